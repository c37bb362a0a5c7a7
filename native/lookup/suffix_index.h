// Where a sequence of tokens has stood before, and what followed it: the index of lookup drafts (SuffixDecoding,
// arXiv 2411.04975, over n-gram chains in place of a tree).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace ridgeline {

// Tokens that may follow a text whose last `num_matched` tokens have stood before. `agreement` is the share of those
// places that go on with the first drafted token, `score` the expected number of drafted tokens that come if the text
// goes on as at one of the places.
struct LookupDraft {
  std::vector<int32_t> tokens;
  int num_matched = 0;
  double agreement = 0, score = 0;
};

// How far a draft goes: `max_tokens`, `factor` tokens for each that matched, and while the share of places that have
// gone this way is at least `min_probability`.
struct LookupLimits {
  int max_tokens = 0;
  double factor = 1, min_probability = 0;
};

// Documents of tokens, of which the oldest go where there are more than `max_documents`, or `max_tokens` in all. For each of `lengths` the places
// where an n-gram ends are a chain, the latest first, that starts at the hash of its tokens; chains of other n-grams
// may share it, so tokens are compared. Memory: 4 bytes a token and 8 more for each length, in powers of two.
class SuffixIndex {
 public:
  // Throws std::invalid_argument unless `lengths` rise from 1 or more, `max_tokens` is 2 to 2^28 and `max_documents` 1
  // or more.
  SuffixIndex(std::vector<int> lengths, int64_t max_tokens, int64_t max_documents);

  // Adds tokens, 0 or more each, to the open document.
  void extend(const int32_t* tokens, int64_t count);
  // Ends the open document: no match reaches across.
  void close();

  // What follows the longest match of the last tokens of `text`, none where the shortest length does not match.
  LookupDraft find(const int32_t* text, int64_t count, const LookupLimits& limits) const;
  // The same for the open document's own end. Where a match reaches up to it the text is in a loop: the draft goes round.
  LookupDraft find_own(const LookupLimits& limits) const;

  int64_t num_tokens() const { return end_ - first_; }
  int64_t num_bytes() const;

 private:
  static constexpr int kMaxSteps = 64;   // places of a chain that are compared: bounds a lookup among equal n-grams
  static constexpr int kMaxPlaces = 32;  // of them that vote on what follows
  static constexpr int32_t kEnd = -1;    // behind a document; equals no token

  struct Chain {
    int length;
    std::vector<uint32_t> latest, earlier;  // ends of n-grams, 0: none; by hash, and by the place they end at
  };

  void append(int32_t token);
  void insert(uint32_t end);
  void reserve(int64_t count);
  void make_room(int64_t count);
  void drop_oldest();
  void clear();
  int32_t at(uint32_t place) const { return tokens_[place & mask_]; }
  int match(uint32_t end, const int32_t* text, int64_t count) const;
  LookupDraft look_up(const int32_t* text, int64_t count, bool own, const LookupLimits& limits) const;
  LookupDraft draft(std::vector<uint32_t>& places, int num_matched, bool own, const LookupLimits& limits) const;

  std::vector<Chain> chains_;
  int64_t max_tokens_, max_documents_;
  std::vector<int32_t> tokens_;  // token i at i & mask_
  uint32_t mask_ = 0, first_ = 0, end_ = 0, open_ = 0;  // the tokens that count; the open document begins at `open_`
  std::deque<uint32_t> ends_;  // of closed documents, each one past its kEnd
};

}  // namespace ridgeline
