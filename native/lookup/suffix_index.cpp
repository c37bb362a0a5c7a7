#include "lookup/suffix_index.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

namespace ridgeline {
namespace {

constexpr uint32_t kMaxPlace = 1u << 31;  // places are 32 bits; behind this one the index begins anew
constexpr int64_t kMaxTokens = 1 << 28;

// The hash of a text read backwards, one token further.
inline uint64_t hashed(uint64_t hash, int32_t token) {
  return (hash ^ (uint64_t)(uint32_t)token) * 0x9E3779B97F4A7C15ull + 0x632BE59BD9B4E019ull;
}

inline uint32_t bucket(uint64_t hash, uint32_t mask) { return (uint32_t)(hash >> 32) & mask; }

}  // namespace

SuffixIndex::SuffixIndex(std::vector<int> lengths, int64_t max_tokens, int64_t max_documents)
    : max_tokens_(max_tokens), max_documents_(max_documents) {
  if (lengths.empty() || lengths.front() < 1 || max_tokens < 2 || max_tokens > kMaxTokens || max_documents < 1 ||
      std::adjacent_find(lengths.begin(), lengths.end(), std::greater_equal<int>()) != lengths.end())
    throw std::invalid_argument("lengths must rise from 1 or more, max_tokens be 2 to 2^28, max_documents 1 or more");
  for (const int length : lengths) chains_.push_back({length, {}, {}});
}

void SuffixIndex::extend(const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] < 0) throw std::invalid_argument("a token id is 0 or more");
  if (count + 1 > max_tokens_) {  // the last ones say most of what comes
    tokens += count + 1 - max_tokens_;
    count = max_tokens_ - 1;
  }
  make_room(count);
  for (int64_t i = 0; i < count; i++) append(tokens[i]);
}

void SuffixIndex::close() {
  if (end_ == open_) return;
  make_room(1);
  append(kEnd);
  ends_.push_back(end_);
  open_ = end_;
  while ((int64_t)ends_.size() > max_documents_) drop_oldest();
}

void SuffixIndex::drop_oldest() {
  first_ = ends_.front();
  ends_.pop_front();
}

LookupDraft SuffixIndex::find(const int32_t* text, int64_t count, const LookupLimits& limits) const {
  return look_up(text, count, false, limits);
}

LookupDraft SuffixIndex::find_own(const LookupLimits& limits) const {
  const int64_t count = std::min<int64_t>(end_ - open_, chains_.back().length);
  std::vector<int32_t> text(count);
  for (int64_t i = 0; i < count; i++) text[i] = at(end_ - (uint32_t)(count - i));
  return look_up(text.data(), count, true, limits);
}

int64_t SuffixIndex::num_bytes() const {
  return (int64_t)tokens_.size() * (int64_t)(sizeof(int32_t) + chains_.size() * 2 * sizeof(uint32_t));
}

void SuffixIndex::append(int32_t token) {
  tokens_[end_ & mask_] = token;
  insert(++end_);
}

// Enters the n-grams that end at `end` and lie in one document, into the chains.
void SuffixIndex::insert(uint32_t end) {
  uint64_t hash = 0;
  int length = 0;
  for (Chain& chain : chains_) {
    uint32_t& earlier = chain.earlier[end & mask_];
    earlier = 0;
    for (; length < chain.length; length++) {
      if ((uint32_t)length == end - first_) return;
      const int32_t token = at(end - 1 - (uint32_t)length);
      if (token == kEnd) return;
      hash = hashed(hash, token);
    }
    uint32_t& latest = chain.latest[bucket(hash, mask_)];
    earlier = latest;
    latest = end;
  }
}

// Makes the oldest documents go until `count` more tokens fit; an open one that is too long begins later.
void SuffixIndex::make_room(int64_t count) {
  if ((int64_t)end_ + count >= kMaxPlace) clear();
  while (num_tokens() + count > max_tokens_ && !ends_.empty()) drop_oldest();
  if (num_tokens() + count > max_tokens_) first_ = open_ = (uint32_t)(end_ + count - max_tokens_);
  reserve(num_tokens() + count);
}

void SuffixIndex::clear() {
  ends_.clear();
  first_ = end_ = open_ = 0;
  for (Chain& chain : chains_) std::fill(chain.latest.begin(), chain.latest.end(), 0u);
}

void SuffixIndex::reserve(int64_t count) {
  if (count <= (int64_t)tokens_.size()) return;
  size_t size = std::max<size_t>(tokens_.size(), 64);
  while ((int64_t)size < count) size *= 2;
  std::vector<int32_t> tokens(size);
  for (uint32_t i = first_; i != end_; i++) tokens[i & (size - 1)] = at(i);
  tokens_ = std::move(tokens);
  mask_ = (uint32_t)size - 1;
  for (Chain& chain : chains_) {
    chain.latest.assign(size, 0);
    chain.earlier.assign(size, 0);
  }
  for (uint32_t end = first_ + 1; end <= end_; end++) insert(end);
}

// How many tokens before `end` are the last ones of the text, up to the longest length.
int SuffixIndex::match(uint32_t end, const int32_t* text, int64_t count) const {
  const int most = (int)std::min<int64_t>({count, chains_.back().length, (int64_t)(end - first_)});
  int length = 0;
  while (length < most && at(end - 1 - (uint32_t)length) == text[count - 1 - length]) length++;
  return length;
}

LookupDraft SuffixIndex::look_up(const int32_t* text, int64_t count, bool own, const LookupLimits& limits) const {
  std::vector<uint64_t> hashes(chains_.size());
  size_t num_chains = 0;
  uint64_t hash = 0;
  int length = 0;
  for (; num_chains < chains_.size() && chains_[num_chains].length <= count; hashes[num_chains++] = hash)
    for (; length < chains_[num_chains].length; length++) hash = hashed(hash, text[count - 1 - length]);
  if (tokens_.empty() || limits.max_tokens < 1) return {};

  std::vector<uint32_t> places;
  places.reserve(kMaxPlaces);
  for (size_t i = num_chains; i-- > 0;) {  // the longest n-gram that has stood before decides
    const Chain& chain = chains_[i];
    int best = chain.length;
    uint32_t end = chain.latest[bucket(hashes[i], mask_)];
    for (int step = 0; step < kMaxSteps && end >= first_ + (uint32_t)chain.length && end != 0; step++) {
      if (end != end_ && at(end) != kEnd) {
        const int matched = match(end, text, count);
        if (matched > best) places.clear();
        if (matched >= best && places.size() < kMaxPlaces) places.push_back(end);
        best = std::max(best, matched);
      }
      const uint32_t before = chain.earlier[end & mask_];
      if (before >= end) break;  // its place has been taken by a later token
      end = before;
    }
    if (!places.empty()) return draft(places, best, own, limits);
  }
  return {};
}

// Follows the places, which are as good as each other, where most of them go; the latest decides among equals.
LookupDraft SuffixIndex::draft(std::vector<uint32_t>& places, int num_matched, bool own,
                               const LookupLimits& limits) const {
  LookupDraft found;
  found.num_matched = num_matched;
  const int most = (int)std::min<double>(limits.max_tokens, limits.factor * num_matched);
  double probability = 1;
  std::vector<std::pair<int32_t, int>> votes;
  for (uint32_t i = 0; (int)i < most; i++) {
    const auto following = [&](uint32_t place) {
      const uint32_t next = place + i;
      if (next < end_) return at(next);
      return own ? found.tokens[next - end_] : kEnd;
    };
    votes.clear();
    for (const uint32_t place : places) {
      const int32_t token = following(place);
      const auto same = std::find_if(votes.begin(), votes.end(), [&](const auto& vote) { return vote.first == token; });
      if (same != votes.end())
        same->second++;
      else if (token != kEnd)
        votes.emplace_back(token, 1);
    }
    if (votes.empty()) break;
    const auto chosen =
        *std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    const double share = (double)chosen.second / (double)places.size();
    probability *= share;
    if (probability < limits.min_probability) break;
    if (i == 0) found.agreement = share;
    std::erase_if(places, [&](uint32_t place) { return following(place) != chosen.first; });
    found.tokens.push_back(chosen.first);
    found.score += probability;
  }
  return found;
}

}  // namespace ridgeline
