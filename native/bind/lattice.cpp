// Lattices: tables of moves, swept by strips or by rows; blocks of one alignment, and many short pairs.
#include <cmath>
#include <memory>

#include "../lattice/lattice.h"
#include "../series/short_pairs.h"
#include "call.h"

namespace bellmax {
namespace {

const LatticeKernels& lattices() {
    static const LatticeKernels best = BELLMAX_BEST(lattice_kernels());
    return best;
}

// The lengths (batch, 2) and the band (batch) of each lattice; None twice for whole matrices without a band.
class Regions {
    std::vector<int64_t> all;
    std::vector<double> none;

public:
    template <class Problem>
    void set(Problem& p, Call& call) {
        const int64_t batch = p.batch, rows = p.rows, columns = p.columns;
        need(rows > 0 && columns > 0, "rows and columns are needed");
        if (call.skips_none()) {
            for (int64_t b = 0; b < batch; ++b) all.insert(all.end(), {rows, columns});
            none.assign(std::size_t(batch), HUGE_VAL);
            need(call.skips_none(), "lengths come with bands");
            p.lengths = all.data();
            p.band = none.data();
            return;
        }
        p.lengths = call.array<const int64_t>({batch, 2});
        p.band = call.array<const double>({batch});
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t* const own = p.lengths + 2 * b;
            need(own[0] >= 1 && own[0] <= rows && own[1] >= 1 && own[1] <= columns, "a length is out of range");
            need(p.band[b] >= 0, "a band is negative");
        }
    }
};

// A block of rows of one pair under dynamic time warping, and what it exchanges with its neighbors: lines as long as
// the rows of the pair. At the end of the arguments: the rows, the columns and the band of the pair, the first row and
// column of the block, Ω, threads.
template <class S>
struct Block : LatticeProblem {
    int64_t pair[2];
    double width;
    bool is_last;
    SlotTerm cost_term{0, 0, false, 1, {}};
    TermTensor cost;

    explicit Block(Call& call) : Block(call, call.split(8)) {}
    Block(Call& call, Call where) : LatticeProblem{} {
        states = 1;
        moves = 3;
        const Move all_moves[] = {{1, 1, 0, 0}, {1, 0, 0, 0}, {0, 1, 0, 0}};
        std::copy(all_moves, all_moves + 3, table);
        starts = ends = {Place::corner, 1};
        is_double = sizeof(S) == sizeof(double);
        is_block = true;
        scale = -1;
        const Tensor matrix = call.tensor();
        Call::array<const S>({1, any_size, any_size}, matrix);
        batch = 1;
        rows = matrix.shape[1];
        columns = matrix.shape[2];
        pair[0] = where.integer();
        pair[1] = where.integer();
        width = where.number();
        row = where.integer();
        column = where.integer();
        cost = like_cost(matrix.numbers);
        cost_term.axes[0] = {Follows::row, -row, 0, nullptr, 0};
        cost_term.axes[1] = {Follows::column, -column, 0, nullptr, 0};
        terms = &cost_term;
        tensors = &cost;
        terms_count = score_tensors = 1;
        omega = where.omega();
        threads = int(where.integer());
        lengths = pair;
        band = &width;
        is_last = row + rows == pair[0];
        need(rows > 0 && columns > 0 && row >= 0 && column >= 0 && row % lattice_strip == 0 &&
                 (rows % lattice_strip == 0 || is_last) && row + rows <= pair[0] && column + columns <= pair[1],
             "the block does not fit the pair");
    }

    TermTensor like_cost(void* numbers) const { return {numbers, 2, {rows, columns}, false}; }

    // One of no numbers stands for none; else it is as for all columns up to the last of the block.
    void read_tape(Call& call) {
        const Tensor given = call.tensor();
        double* const numbers = Call::array<double>({1, any_size}, given);
        tape_size = given.shape[1];
        need(tape_size == 0 || tape_size == lattices().tape_size(*this), "the tape does not fit the block");
        tape = tape_size ? numbers : nullptr;
    }
    // A line, which may have any length where there is no neighbor.
    template <class T>
    T* read_line(Call& call, bool has_neighbour) const {
        T* const line = call.array<T>({has_neighbour ? pair[1] : any_size});
        return has_neighbour ? line : nullptr;
    }
};

template <class S>
bool dtw_forward_block(Call& call) {
    Block<S> p(call);
    S* const value = call.array<S>({1});
    S* const greatest = call.array<S>({1});
    p.read_tape(call);
    p.line_above = p.template read_line<const double>(call, p.row > 0);
    p.line_below = p.template read_line<double>(call, !p.is_last);
    const bool by_products = call.integer();
    need(!by_products || (p.omega.is_sum && sizeof(S) == 4), "products are for negentropy in float");
    double found[2];
    const bool is_sound = run(lattices().forward_block, p, by_products, found, found + 1);
    *value = S(found[0]);
    *greatest = S(found[1]);
    return is_sound;
}

template <class S>
bool dtw_backward_block(Call& call) {
    Block<S> p(call);
    p.read_tape(call);
    need(p.tape, "the tape was not kept");
    const double seed = *call.array<const S>({1});
    const TermTensor out = p.like_cost(call.array<S>({1, p.rows, p.columns}));
    p.line_above = p.template read_line<const double>(call, p.row > 0);
    p.mass_below = p.template read_line<const double>(call, !p.is_last);
    p.mass_above = p.template read_line<double>(call, p.row > 0);
    return run(lattices().backward, p, &seed, &out);
}

bool dtw_fits_products(Call& call) {
    const double greatest = call.number();
    return lattices().fits_products(greatest, call.integer());
}

template <class S>
Series<S> read_series(Call& call) {
    const Tensor numbers = call.tensor();
    const int64_t *const shape = numbers.shape, *const lengths = call.array<const int64_t>({shape[0]});
    for (int64_t k = 0; k < shape[0]; ++k) need(lengths[k] >= 1 && lengths[k] <= shape[1], "a length is out of range");
    return {shape[0], shape[1], shape[2], Call::array<const S>({any_size, any_size, any_size}, numbers), lengths};
}

template <class S>
bool dtw_short_pairs(Call& call) {
    ShortPairs<S> p{};
    p.x = read_series<S>(call);
    p.y = read_series<S>(call);
    const Tensor first = call.tensor();
    p.pairs = first.shape[0];
    p.first = Call::array<const int64_t>({any_size}, first);
    p.second = call.array<const int64_t>({p.pairs});
    S* const values = call.array<S>({p.pairs});
    p.power = int(call.integer());
    p.scale = call.number();
    p.omega = call.omega();
    p.threads = threads_for(p.pairs * p.x.length * p.y.length, int(call.integer()));
    need(p.x.features == p.y.features && (p.power == 1 || p.power == 2), "the series do not fit together");
    for (int64_t n = 0; n < p.pairs; ++n) {
        need(p.first[n] >= 0 && p.first[n] < p.x.count && p.second[n] >= 0 && p.second[n] < p.y.count,
             "a pair names no series");
    }
    static const ShortPairsKernels<S> best = BELLMAX_BEST(short_pairs_kernels<S>());
    return run(best.values, p, values);
}

// A table of moves with the terms of its scores, read once for all calls.
struct PreparedLattice {
    static constexpr const char* name = "bellmax.lattice";
    double scale;
    int states, moves;
    Move table[most_moves];
    Ends starts, ends;
    std::vector<SlotTerm> terms;  // `constant` is the number of the labels of an axis that follows labels

    int slots() const { return 3 * states + moves; }
};

Ends ends_of(const int64_t* integers) {
    const bool is_place = integers[0] >= 0 && integers[0] <= int64_t(Place::anywhere);
    need(is_place && integers[1] >= 0 && integers[1] < 1 << most_states, "there is no such place");
    return {Place(integers[0]), std::uint32_t(integers[1])};
}

Move move_of(const int64_t* integers, int states) {
    const int64_t di = integers[0], dj = integers[1], from = integers[2], to = integers[3];
    need(di >= 0 && dj >= 0 && from >= 0 && to >= 0 && from < states && to < states, "a move is out of range");
    need(di + dj > 0 || from < to, "a move that stays in its cell must lead to a higher state");
    return {di, dj, int(from), int(to)};
}

SlotTerm term_of(const int64_t* integers, double coefficient, int slots) {
    need(integers[0] >= 0 && integers[0] < slots && integers[1] >= 0, "a term is out of range");
    SlotTerm term{int(integers[0]), int(integers[1]), integers[2] != 0, coefficient, {}};
    for (int d = 0; d < most_axes; ++d) {
        const int64_t* const axis = integers + 3 + 3 * d;
        need(axis[0] >= 0 && axis[0] <= int(Follows::nothing) && axis[2] >= 0, "an axis is out of range");
        term.axes[d] = {Follows(axis[0]), axis[1], axis[2], nullptr, 0};
    }
    return term;
}

// From integers: −1 if scores are costs, else 1; the number of states; the place and the states, as bits, where paths
// start, the same where they end; the number of moves; for each move, rows, columns, the state that it leads from and
// the one that it leads to; for each term, the slot, the number of a score or of a mask, 1 for a mask, and for each of
// three axes what it follows, the offset, and the constant or the number of the labels. And the coefficients of the
// terms.
PyObject* prepare_lattice(Call& call) {
    const auto integers = call.integers();
    const auto coefficients = call.numbers();
    constexpr std::size_t head = 7, move_size = 4, term_size = 3 + 3 * most_axes;
    need(integers.size() >= head, "a table has a sense, states, starts, ends and moves");
    const int64_t* next = integers.data();
    need(next[1] > 0 && next[1] <= most_states, "a lattice has up to 8 states");
    need(next[6] >= 0 && next[6] <= most_moves, "a lattice has up to 16 moves");
    auto prepared = std::make_unique<PreparedLattice>();
    *prepared = {double(next[0]), int(next[1]), int(next[6]), {}, ends_of(next + 2), ends_of(next + 4), {}};
    need(integers.size() == head + move_size * std::size_t(prepared->moves) + term_size * coefficients.size(),
         "a table has four integers for each move and twelve for each term");
    next += head;
    for (int m = 0; m < prepared->moves; ++m, next += move_size) prepared->table[m] = move_of(next, prepared->states);
    for (const double coefficient : coefficients) {
        prepared->terms.push_back(term_of(next, coefficient, prepared->slots()));
        next += term_size;
    }
    return capsule_of(std::move(prepared));
}

// The arguments of every kernel: the prepared lattice, rows, columns, lengths, bands, Ω, the scores, the labels, the
// masks; and at the end, threads.
struct Lattice : LatticeProblem {
    Regions regions;
    std::vector<TermTensor> read;
    std::vector<SlotTerm> all_terms;

    explicit Lattice(Call& call) : LatticeProblem{} {
        const auto& prepared = call.capsule<PreparedLattice>();
        scale = prepared.scale;
        states = prepared.states;
        moves = prepared.moves;
        starts = prepared.starts;
        ends = prepared.ends;
        all_terms = prepared.terms;
        rows = call.integer();
        columns = call.integer();
        for (int m = 0; m < moves; ++m) {  // a move that is longer than the lattice has no source, whatever its length
            const Move& move = prepared.table[m];
            table[m] = {std::min(move.di, rows), std::min(move.dj, columns), move.from, move.to};
        }
        Call lengths_and_bands = call;
        call.skip(2);
        omega = call.omega();
        read_tensors(call);
        regions.set(*this, lengths_and_bands);
        threads = threads_for(batch * rows * columns * (moves + 1), int(call.split(1).integer()));
        tape_size = lattices().tape_size(*this);
    }

    void read_tensors(Call& call) {
        const auto scores = call.list();
        need(!scores.empty(), "a lattice has scores");
        const Tensor first = Call::tensor_of(scores[0]);
        need(first.dims >= 1, "scores do not fit the lattice");
        batch = first.shape[0];
        is_double = first.kind == Kind::float64;
        read = tensors_of(scores, is_double ? Kind::float64 : Kind::float32);
        score_tensors = int(read.size());
        std::vector<Tensor> labels;
        for (PyObject* const source : call.list()) {
            labels.push_back(Call::tensor_of(source));
            Call::array<const int64_t>({batch, any_size}, labels.back());
        }
        const auto masks = tensors_of(call.list(), Kind::boolean);
        read.insert(read.end(), masks.begin(), masks.end());
        tensors = read.data();
        terms_count = int(all_terms.size());
        terms = all_terms.data();
        for (SlotTerm& term : all_terms) bind_term(term, labels);
    }
    void bind_term(SlotTerm& term, const std::vector<Tensor>& labels) const {
        if (term.is_mask) term.tensor += score_tensors;
        need(term.tensor < int(read.size()) && term.is_mask == (term.tensor >= score_tensors),
             "a term is out of range");
        for (int d = 0; d < read[std::size_t(term.tensor)].dims; ++d) {
            TermAxis& axis = term.axes[d];
            if (axis.follows != Follows::label_of_row && axis.follows != Follows::label_of_column) continue;
            need(axis.constant < int64_t(labels.size()), "a term has labels that are not there");
            const Tensor& own = labels[std::size_t(axis.constant)];
            axis.labels = static_cast<const int64_t*>(own.numbers);
            axis.labels_count = own.shape[1];
        }
    }
    std::vector<TermTensor> tensors_of(const std::vector<PyObject*>& sources, Kind kind) const {
        std::vector<TermTensor> found;
        for (PyObject* const source : sources) {
            const Tensor tensor = Call::tensor_of(source);
            if (tensor.kind != kind) throw WrongType();
            need(tensor.dims >= 1 && one_or(tensor.shape[0], batch), "scores do not fit the lattice");
            found.push_back({tensor.numbers, tensor.dims - 1, {}, tensor.shape[0] != batch});
            std::copy(tensor.shape + 1, tensor.shape + tensor.dims, found.back().shape);
        }
        return found;
    }
    // Tensors of the shapes of the scores.
    std::vector<TermTensor> like_scores(Call& call) const {
        const auto found = tensors_of(call.list(), is_double ? Kind::float64 : Kind::float32);
        bool fits = int(found.size()) == score_tensors;
        for (std::size_t n = 0; fits && n < found.size(); ++n) {
            fits = found[n].dims == read[n].dims && found[n].is_shared == read[n].is_shared &&
                   std::equal(found[n].shape, found[n].shape + found[n].dims, read[n].shape);
        }
        need(fits, "the shapes of tensors do not fit together");
        return found;
    }
    // Those that kernels write.
    std::vector<TermTensor> results(Call& call) const {
        auto found = like_scores(call);
        for (const TermTensor& one : found) {
            const int64_t numbers = (one.is_shared ? 1 : batch) * one.size();
            prefer_large_pages(one.numbers, numbers * int64_t(is_double ? sizeof(double) : sizeof(float)));
        }
        return found;
    }
    // An empty tape means that only the value is needed.
    void read_tape(const Tensor& found) {
        double* const numbers = Call::array<double>({batch, any_size}, found);
        need(found.shape[1] == 0 || found.shape[1] == tape_size, "the tape does not fit the lattice");
        tape = found.shape[1] ? numbers : nullptr;
    }
    void need_tape(const Tensor& found) {
        read_tape(found);
        need(tape, "the tape was not kept");
    }
};

bool lattice_forward(Call& call) {
    Lattice p(call);
    const Tensor value = call.tensor();
    p.read_tape(call.tensor());
    std::vector<double> values(std::size_t(p.batch));
    const bool is_sound = run(lattices().forward, p, values.data());
    if (value.kind == Kind::float64) {
        std::copy(values.begin(), values.end(), Call::array<double>({p.batch}, value));
    } else {
        std::copy(values.begin(), values.end(), Call::array<float>({p.batch}, value));
    }
    return is_sound;
}

// The values of all ends, in Ω's unit.
bool lattice_end_values(Call& call) {
    Lattice p(call);
    p.end_values = call.array<double>({p.batch, lattices().ends_size(p)});
    std::vector<double> values(std::size_t(p.batch));
    return run(lattices().forward, p, values.data());
}

bool lattice_max_marginals(Call& call) {
    Lattice p(call);
    const auto out = p.tensors_of(call.list(), p.is_double ? Kind::float64 : Kind::float32);
    const bool fits = out.size() == 1 && out[0].dims == p.read[0].dims && !out[0].is_shared &&
                      std::equal(out[0].shape, out[0].shape + out[0].dims, p.read[0].shape);
    need(fits && !p.read[0].is_shared, "the result does not fit the first score");
    return run(lattices().max_marginals, p, out[0]);
}

bool lattice_backward(Call& call) {
    Lattice p(call);
    p.need_tape(call.tensor());
    const auto seed = call.vector<double>(p.batch);
    const auto out = p.results(call);
    return run(lattices().backward, p, seed.data(), out.data());
}

bool lattice_hessian(Call& call) {
    Lattice p(call);
    p.need_tape(call.tensor());
    const auto seed = call.vector<double>(p.batch);
    const auto z = p.like_scores(call), out = p.results(call);
    return run(lattices().hessian, p, seed.data(), z.data(), out.data());
}

bool lattice_sample(Call& call) {
    Lattice p(call);
    p.need_tape(call.tensor());
    const Tensor uniforms = call.tensor();
    const int64_t longest = p.longest(), draws = uniforms.shape[1];
    int64_t* const paths = call.array<int64_t>({p.batch, draws, longest, 2});
    return run(lattices().sample, p, draws, Call::array<const double>({p.batch, draws, longest + 1}, uniforms), paths);
}

#define BOTH(name) method<name<float>, name<double>>(#name)

}  // namespace

PyMethodDef lattice_methods[] = {BOTH(dtw_forward_block),
                                 BOTH(dtw_backward_block),
                                 BOTH(dtw_short_pairs),
                                 method<dtw_fits_products>("dtw_fits_products"),
                                 method<lattice_forward>("lattice_forward"),
                                 method<lattice_backward>("lattice_backward"),
                                 method<lattice_hessian>("lattice_hessian"),
                                 method<lattice_sample>("lattice_sample"),
                                 method<lattice_end_values>("lattice_end_values"),
                                 method<lattice_max_marginals>("lattice_max_marginals"),
                                 maker<prepare_lattice>("prepare_lattice"),
                                 {}};

}  // namespace bellmax
