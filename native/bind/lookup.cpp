// The index of lookup drafts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "lookup/suffix_index.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

using Tokens = std::vector<int32_t>;
using Found = std::optional<std::tuple<Tokens, int, double, double>>;

Found found(LookupDraft&& draft) {
  if (draft.tokens.empty()) return std::nullopt;
  return std::make_tuple(std::move(draft.tokens), draft.num_matched, draft.agreement, draft.score);
}

}  // namespace

void bind_lookup(nb::module_& module) {
  nb::class_<SuffixIndex>(module, "SuffixIndex",
                          "Where tokens have stood before in a list of documents, and what followed them.")
      .def(nb::init<std::vector<int>, int64_t, int64_t>(), "lengths"_a, "max_tokens"_a, "max_documents"_a = 1 << 30,
           "Matches are as long as one of `lengths`, rising, or longer up to the last; the oldest documents go.")
      .def(
          "extend", [](SuffixIndex& self, const Tokens& tokens) { self.extend(tokens.data(), (int64_t)tokens.size()); },
          "tokens"_a, "Add tokens to the open document.")
      .def("close", &SuffixIndex::close, "End the open document.")
      .def(
          "find",
          [](const SuffixIndex& self, const Tokens& text, int max_tokens, double factor, double min_probability) {
            return found(self.find(text.data(), (int64_t)text.size(), {max_tokens, factor, min_probability}));
          },
          "text"_a, "max_tokens"_a, "factor"_a, "min_probability"_a,
          "Return (tokens, length of the match, agreement on the first, expected number right) of what follows text.")
      .def(
          "find_own",
          [](const SuffixIndex& self, int max_tokens, double factor, double min_probability) {
            return found(self.find_own({max_tokens, factor, min_probability}));
          },
          "max_tokens"_a, "factor"_a, "min_probability"_a, "Return the same for the open document's own end.")
      .def_prop_ro("num_tokens", &SuffixIndex::num_tokens, "Tokens of all documents, with one for the end of each.")
      .def_prop_ro("num_bytes", &SuffixIndex::num_bytes, "Memory.");
}

}  // namespace ridgeline
