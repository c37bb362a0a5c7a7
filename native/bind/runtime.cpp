// The tape for Python. A tape is built op by op; buffers are numbers. Addresses are of memory that the
// caller keeps alive as long as the tape.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "bind/bind.h"
#include "bind/chain.h"
#include "bind/experts.h"
#include "bind/gil.h"
#include "bind/latent.h"
#include "bind/matrix.h"
#include "bind/recurrent.h"
#include "bind/retained.h"
#include "bind/rounds.h"
#include "bind/started.h"
#include "bind/step.h"
#include "runtime/isa.h"
#include "runtime/lora.h"
#include "runtime/tape.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

constexpr int64_t kPending = -1;  // PENDING of core/step.py

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A Tape whose buffers and plans have numbers.
class TapeBuilder {
 public:
  TapeBuilder(const std::string& level, Pool* pool, bool deterministic)
      : kernels_(kernels_of(level)), tape_(kernels_, pool, deterministic), runs_(pool != nullptr) {}
  ~TapeBuilder() { started_tapes().erase(&tape_); }

  int add_buffer(const std::string& rows, int64_t width) {
    require(rows == "tokens" || rows == "logits", "a buffer has rows for 'tokens' or for 'logits'");
    require(width > 0, "a buffer is at least 1 wide");
    buffers_.push_back(tape_.add_buffer(rows == "tokens" ? Rows::tokens : Rows::logits, width));
    return (int)buffers_.size() - 1;
  }

  int add_slice(int buffer, int64_t offset, int64_t width) {
    require(0 <= offset && width > 0 && offset + width <= at(buffer)->width, "a slice is columns of the buffer");
    buffers_.push_back(tape_.add_slice(at(buffer), offset, width));
    return (int)buffers_.size() - 1;
  }

  void embed_packed(const NativeMatrix& matrix, const std::string& ids, float scale, int out, int64_t vocab) {
    add_embed({matrix.matrix, WeightKind::f32, nullptr}, ids, scale, out, vocab);
  }

  void embed_rows(uintptr_t rows, const std::string& kind, const std::string& ids, float scale, int out, int64_t vocab) {
    add_embed({std::nullopt, weight_kind_of(kind), pointer<const uint8_t>(rows)}, ids, scale, out, vocab);
  }

  void rope_angles(std::vector<float> frequencies, float scale, int cos, int sin) {
    tape_.add(std::make_unique<RopeAngles>(std::move(frequencies), scale, at(cos), at(sin)));
  }

  void linear(const NativeMatrix& matrix, const Norm& norm, int in, std::optional<int> out, bool select,
              const std::string& epilogue, const std::string& activation, uintptr_t bias, float softcap) {
    const Epilogue after{epilogue_kind_of(epilogue), activation_of(activation), softcap, pointer<const float>(bias),
                         nullptr, 0};
    const Linear::Operands operands{at(in), out ? at(*out) : nullptr, select, !out.has_value()};
    require(!operands.out || !operands.out->slice_of, "a matrix product writes whole panels, not a slice");
    tape_.add(std::make_unique<Linear>(matrix.matrix, norm, after, operands, tape_.linear_input(),
                                       tape_.deterministic()));
  }

  void row_wise(RowWise::Function function, int x, std::optional<int> y, int out, const RowWise::Options& options) {
    tape_.add(std::make_unique<RowWise>(function, RowWise::Operands{at(x), y ? at(*y) : nullptr, at(out)}, options));
  }

  void normalize(const Norm& norm, int x, int out, int64_t head_dim) {
    row_wise(RowWise::Function::normalize, x, {}, out, {norm, {}, 0, head_dim});
  }
  void add(int x, int y, int out) { row_wise(RowWise::Function::add, x, y, out, {}); }
  void add_row(int x, uintptr_t row, int out) {
    row_wise(RowWise::Function::add_row, x, {}, out, {{}, {}, 0, 0, pointer<const float>(row)});
  }
  void activate(const std::string& function, int x, int out) {
    row_wise(RowWise::Function::activate, x, {}, out, {{}, activation_of(function), 0, 0});
  }
  void gate(const std::string& function, int x, int y, int out) {
    row_wise(RowWise::Function::gate, x, y, out, {{}, activation_of(function), 0, 0});
  }
  void scale(float factor, int x, int out) { row_wise(RowWise::Function::scale, x, {}, out, {{}, {}, factor, 0}); }
  void softcap(float cap, int x, int out) { row_wise(RowWise::Function::softcap, x, {}, out, {{}, {}, cap, 0}); }
  void select(int x, int out) { row_wise(RowWise::Function::select, x, {}, out, {}); }

  void rotate(int x, int out, int64_t head_dim, int cos, int sin, bool interleaved, int64_t offset) {
    const Rotation rotation = rotation_of(cos, sin, interleaved, offset, head_dim);
    require(at(x)->width == at(out)->width && at(x)->width % head_dim == 0, "a row is whole heads");
    tape_.add(std::make_unique<Rotate>(rotation, head_dim, at(x), at(out)));
  }

  void heads(std::optional<int> q, int k, int v, const KvMemory& memory, int group, const Norm& q_norm,
             const Norm& k_norm, std::optional<int> cos, std::optional<int> sin, bool interleaved, int64_t offset) {
    const int64_t dim = memory.layout.head_dim, width = memory.layout.num_heads * dim;
    require(at(k)->width == width && at(v)->width == width && (!q || at(*q)->width % dim == 0),
            "queries, keys and values are whole heads, as many as the cache has");
    const Rotation rotation = cos && sin ? rotation_of(*cos, *sin, interleaved, offset, dim) : Rotation{};
    tape_.add(std::make_unique<Heads>(
        Heads::Options{q ? at(*q) : nullptr, at(k), at(v), q_norm, k_norm, rotation, memory, group}));
  }

  void attention(const AttentionSpec& spec, const KvMemory& memory, int group, int q, int out) {
    const KvLayout& layout = memory.layout;
    SharedPlan* plan = tape_.add_plan(
        {group, spec.num_heads, layout.num_heads, layout.value_dim, spec.window, layout.block_size});
    tape_.add(std::make_unique<Attention>(spec, memory, plan, at(q), at(out)));
  }

  void gate_rows(int x, int gate, int out) { row_wise(RowWise::Function::gate_rows, x, gate, out, {}); }

  void lora(int x, int y, int out, uintptr_t a, uintptr_t b, int64_t count, int64_t rank) {
    require(at(y)->width == at(out)->width && count > 0 && rank > 0, "adapters add to rows of the same width");
    tape_.add(std::make_unique<Lora>(
        Lora::Options{at(x), at(y), at(out), pointer<const float>(a), pointer<const float>(b), count, rank}));
  }

  void sample(int64_t vocab_size) {
    tape_.need_scratch(kernels_.sample.scratch_bytes(vocab_size));
    tape_.add(std::make_unique<Sample>(vocab_size));
  }

  void retain(int buffer) { retained_.add(at(buffer)); }

  int64_t allocated_bytes() const { return tape_.allocated_bytes(); }

  int64_t workspace_bytes(int64_t num_tokens, int64_t num_spans, int64_t num_rows, int64_t context,
                          int num_threads) const {
    require(num_tokens > 0 && num_spans > 0 && num_rows >= 0 && context > 0 && num_threads > 0,
            "a step has tokens, spans and a context, and threads that compute it");
    return tape_.workspace_bytes({num_tokens, num_spans, num_rows, context}, num_threads);
  }

  int64_t size() const { return tape_.size(); }

  // For the bindings of an area, bind/<area>.h.
  Tape& tape() { return tape_; }
  const KernelTable& kernels() const { return kernels_; }
  Buffer* buffer(int index) { return at(index); }
  const Retained& retained() const { return retained_; }

  // What `compute(tape, step)` returns of a step whose rows are sampled.
  template <class Compute>
  auto compute(const Array<const int64_t, 1>& block, const Array<float, 2>& logits, const Compute& compute,
               const std::optional<Trials>& trials = {}) {
    return alone([&](Tape& tape) {
      step_ = &reader_.read(block, true);
      require((int64_t)logits.shape(0) >= step_->num_rows, "one row of logits per row that needs them is needed");
      if (trials) reader_.verify(trials->first, trials->second);
      step_->logits = logits.data();
      step_->logits_stride = (int64_t)logits.shape(1);
      return compute(tape, *step_);
    });
  }

  // What `compute(tape)` returns, which computes with it as nobody else does.
  template <class Compute>
  auto alone(const Compute& compute) {
    const std::unique_lock turn = take_turn();
    following_.reset();
    end_started();
    return compute(tape_);
  }

  // Returns the highest slot of the cache that the step writes, or 0.
  int64_t run(const Array<const int64_t, 1>& block, Array<float, 2> logits, int64_t begin, int64_t end,
              std::optional<Array<int64_t, 1>> sampled, std::optional<Array<double, 1>> seconds,
              const Retained::Place& retained, const std::optional<Trials>& trials) {
    const std::unique_lock turn = take_turn();
    require(0 <= begin && begin <= end && end <= tape_.size(), "the range is not within the tape");
    following_.reset();
    end_started();
    require(!seconds || (int64_t)seconds->shape(0) == tape_.size(), "one place per instruction is needed");
    read(block, logits, sampled, retained, trials);
    const WithoutGil unlocked;
    tape_.run(*step_, begin, end, seconds ? seconds->data() : nullptr);
    return results(sampled, retained);
  }

  void start(const Array<const int64_t, 1>& block, Array<float, 2> logits, Array<int64_t, 1> sampled,
             const Retained::Place& retained, const std::optional<Trials>& trials) {
    const std::unique_lock turn = take_turn();
    following_.reset();
    end_started();
    read(block, logits, sampled, retained, trials);
    started_.emplace(Started{block, logits, sampled, retained, trials});
    started_tapes().insert(&tape_);
    const WithoutGil unlocked;
    tape_.start(*step_);
  }

  void follow(Array<int64_t, 1> block, Array<float, 2> logits, Array<int64_t, 1> sampled,
              const Retained::Place& retained, std::optional<nb::callable> check) {
    const std::unique_lock turn = take_turn();
    require(started_.has_value(), "no step was started");
    const Started step{Array<const int64_t, 1>(block), logits, sampled, retained, {}};
    following_.emplace(Following{step, block.data(), check});
  }

  // Returns what `run` does, of the step that was started, and whether the one that follows it was.
  std::pair<int64_t, bool> finish() {
    const std::unique_lock turn = take_turn();
    require(started_.has_value(), "no step was started");
    auto next = std::exchange(following_, std::nullopt);
    const int64_t highest = end_started(next ? &*next : nullptr);
    return {highest, started_.has_value()};
  }

  // The buffer's first `rows` rows as they are now, [rows, width]; valid until the next step.
  nb::ndarray<nb::numpy, float, nb::ndim<2>> view(int buffer, int64_t rows) {
    Buffer* b = at(buffer);
    const size_t shape[2] = {(size_t)rows, (size_t)b->width};
    const int64_t strides[2] = {b->stride, 1};
    return {b->data(), 2, shape, nb::handle(), strides};
  }

 private:
  std::unique_lock<std::mutex> take_turn() {
    require(runs_, "a tape without a pool can be measured, and not run");
    std::unique_lock turn(running_, std::try_to_lock);
    if (!turn) throw std::runtime_error("a step of this engine runs in another thread: it serves one thread at a time");
    return turn;
  }

  // Makes the step of these arguments the one that is run.
  void read(const Array<const int64_t, 1>& block, const Array<float, 2>& logits,
            const std::optional<Array<int64_t, 1>>& sampled, const Retained::Place& retained,
            const std::optional<Trials>& trials = {}) {
    step_ = &reader_.read(block, sampled.has_value());
    require(!sampled || (int64_t)sampled->shape(0) == step_->num_sample_rows, "one place per row to sample is needed");
    require((int64_t)logits.shape(0) == step_->num_rows, "one row of logits per row that needs them is needed");
    retained_.check(retained, step_->num_tokens);
    if (trials) reader_.verify(trials->first, trials->second);
    step_->logits = logits.data();
    step_->logits_stride = (int64_t)logits.shape(1);
  }

  int64_t results(const std::optional<Array<int64_t, 1>>& sampled, const Retained::Place& retained) const {
    retained_.write(retained, step_->num_tokens);
    if (sampled)
      for (size_t i = 0; i < reader_.sample_rows().size(); i++) sampled->data()[i] = reader_.sample_rows()[i].token;
    return step_->highest_slot();
  }

  // Starts `next` where the step that was started ends. Where it cannot be started it is not, and its caller, who will
  // start it, hears why.
  int64_t end_started(const Following* next = nullptr) {
    if (!started_) return 0;
    int64_t highest = 0;
    bool goes_on = false;
    {
      const WithoutGil unlocked;
      tape_.finish();
      highest = results(started_->sampled, started_->retained);
      if (next && !next->check) goes_on = start_following(*next);
    }
    if (next && next->check) {
      (*next->check)();
      const WithoutGil unlocked;
      goes_on = start_following(*next);
    }
    if (goes_on) {
      started_.emplace(next->step);
    } else {
      started_.reset();
      started_tapes().erase(&tape_);
    }
    return highest;
  }

  bool start_following(const Following& next) {
    try {
      const int64_t num_sampled = (int64_t)started_->sampled.shape(0);
      const Started& step = next.step;
      read(step.block, step.logits, step.sampled, step.retained);
      require(step_->num_tokens == num_sampled, "a step follows another token by token");
      int64_t* const token_ids = next.block + (step_->token_ids - next.block);
      for (int64_t t = 0; t < num_sampled; t++)  // where none could be sampled, any will do
        if (token_ids[t] == kPending) token_ids[t] = std::max<int64_t>(0, started_->sampled.data()[t]);
      tape_.start(*step_);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  Buffer* at(int index) {
    require(index >= 0 && (size_t)index < buffers_.size(), "no buffer has this number");
    return buffers_[(size_t)index];
  }

  Rotation rotation_of(int cos, int sin, bool interleaved, int64_t offset, int64_t head_dim) {
    require(at(cos)->width == at(sin)->width && 0 <= offset && offset + 2 * at(cos)->width <= head_dim,
            "a head has two entries for each angle");
    return {at(cos), at(sin), interleaved, offset};
  }

  void add_embed(const Table& table, const std::string& ids, float scale, int out, int64_t vocab) {
    require(ids == "tokens" || ids == "positions" || (ids == "types" && vocab > 0), "no table is looked up by these ids");
    const auto by = ids == "tokens" ? Embed::Ids::tokens : ids == "types" ? Embed::Ids::types : Embed::Ids::positions;
    tape_.add(std::make_unique<Embed>(table, by, scale, at(out), vocab));
  }

  const KernelTable& kernels_;
  Tape tape_;
  bool runs_;
  std::vector<Buffer*> buffers_;
  Retained retained_;
  StepReader reader_;
  Step* step_ = nullptr;  // the last that was read
  std::optional<Started> started_;
  std::optional<Following> following_;
  std::mutex running_;
};

}  // namespace

void bind_runtime(nb::module_& module) {
  nb::class_<TapeBuilder> tape(module, "Tape");
  tape.def(nb::init<const std::string&, Pool*, bool>(), "level"_a, "pool"_a.none(), "deterministic"_a = false,
           nb::keep_alive<1, 3>())
      .def("buffer", &TapeBuilder::add_buffer, "rows"_a, "width"_a)
      .def("slice", &TapeBuilder::add_slice, "buffer"_a, "offset"_a, "width"_a,
           "Columns [offset, offset + width) of a buffer, as a buffer: to read, or to write other than by `linear`.")
      .def("embed_packed", &TapeBuilder::embed_packed, "matrix"_a, "ids"_a, "scale"_a, "out"_a, "vocab"_a = 0)
      .def("embed_rows", &TapeBuilder::embed_rows, "rows"_a, "kind"_a, "ids"_a, "scale"_a, "out"_a, "vocab"_a = 0)
      .def("rope_angles", &TapeBuilder::rope_angles, "frequencies"_a, "scale"_a, "cos"_a, "sin"_a)
      .def("linear", &TapeBuilder::linear, "matrix"_a, "norm"_a, "x"_a, "out"_a.none(), "select"_a = false,
           "epilogue"_a = "store", "activation"_a = "relu", "bias"_a = 0, "softcap"_a = 0.0f)
      .def("normalize", &TapeBuilder::normalize, "norm"_a, "x"_a, "out"_a, "head_dim"_a = 0)
      .def("add", &TapeBuilder::add, "x"_a, "y"_a, "out"_a)
      .def("add_row", &TapeBuilder::add_row, "x"_a, "row"_a, "out"_a)
      .def("activate", &TapeBuilder::activate, "function"_a, "x"_a, "out"_a)
      .def("gate", &TapeBuilder::gate, "function"_a, "x"_a, "y"_a, "out"_a)
      .def("scale", &TapeBuilder::scale, "factor"_a, "x"_a, "out"_a)
      .def("lora", &TapeBuilder::lora, "x"_a, "y"_a, "out"_a, "a"_a, "b"_a, "count"_a, "rank"_a)
      .def("softcap", &TapeBuilder::softcap, "cap"_a, "x"_a, "out"_a)
      .def("select", &TapeBuilder::select, "x"_a, "out"_a)
      .def("rotate", &TapeBuilder::rotate, "x"_a, "out"_a, "head_dim"_a, "cos"_a, "sin"_a, "interleaved"_a = false,
           "offset"_a = 0)
      .def("heads", &TapeBuilder::heads, "q"_a.none(), "k"_a, "v"_a, "memory"_a, "group"_a, "q_norm"_a, "k_norm"_a,
           "cos"_a.none() = nb::none(), "sin"_a.none() = nb::none(), "interleaved"_a = false, "offset"_a = 0)
      .def("attention", &TapeBuilder::attention, "spec"_a, "memory"_a, "group"_a, "q"_a, "out"_a)
      .def("gate_rows", &TapeBuilder::gate_rows, "x"_a, "gate"_a, "out"_a)
      .def("sample", &TapeBuilder::sample, "vocab_size"_a)
      .def("retain", &TapeBuilder::retain, "buffer"_a, "Has steps leave its rows behind those of others, where they get a place.")
      .def("run", &TapeBuilder::run, "block"_a.noconvert(), "logits"_a, "begin"_a, "end"_a,
           "sampled"_a.none() = nb::none(), "seconds"_a.none() = nb::none(), "retained"_a.none() = nb::none(),
           "trials"_a.none() = nb::none(), "Returns the highest slot written, or 0.")
      .def("start", &TapeBuilder::start, "block"_a.noconvert(), "logits"_a, "sampled"_a, "retained"_a.none() = nb::none(),
           "trials"_a.none() = nb::none(),
           "Runs the step on the pool's other threads; its memory is in use until `finish`.")
      .def("follow", &TapeBuilder::follow, "block"_a.noconvert(), "logits"_a, "sampled"_a,
           "retained"_a.none() = nb::none(), "check"_a.none() = nb::none(),
           "Has `finish` start this step too, its pending tokens being those that the one before has sampled, and `check`, "
           "which must not raise, may have changed.")
      .def("finish", &TapeBuilder::finish,
           "Finishes the step that was started; returns what `run` does, and whether one that follows was started.")
      .def("view", &TapeBuilder::view, "buffer"_a, "rows"_a, nb::rv_policy::reference_internal)
      .def_prop_ro("allocated_bytes", &TapeBuilder::allocated_bytes, "What the steps so far have needed.")
      .def("workspace_bytes", &TapeBuilder::workspace_bytes, "num_tokens"_a, "num_spans"_a, "num_rows"_a, "context"_a,
           "num_threads"_a, "The most that a step within these limits may need.")
      .def("__len__", &TapeBuilder::size);
  chain_bindings::bind(tape);
  rounds_bindings::bind(tape);
  expert_bindings::bind(tape);
  latent_bindings::bind(tape);
  recurrent_bindings::bind(module, tape);
}

}  // namespace ridgeline
