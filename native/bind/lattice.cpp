// Lattices: tables of moves, swept by strips or by rows; blocks of one alignment, and many short pairs.
#include <cmath>
#include <string>

#include "../rows/rows.h"
#include "../table/short_pairs.h"
#include "../table/table.h"
#include "call.h"

namespace bellmax {
namespace {

const LatticeKernels& lattices() {
    static const LatticeKernels best = BELLMAX_BEST(lattice_kernels());
    return best;
}

const RowsKernels& by_rows() {
    static const RowsKernels best = BELLMAX_BEST(rows_kernels());
    return best;
}

// The lengths (batch, 2) and the band (batch) of each lattice, or None twice: those of whole matrices.
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

// A block of rows of one pair under dynamic time warping, and what it exchanges with its neighbours: lines as long as the
// pair's rows. At the end of the arguments: the rows, the columns and the band of the pair, the first row and column of
// the block, Ω, threads.
template <class S>
struct Block : LatticeProblem {
    int64_t pair[2];
    double width;
    bool is_last;
    Scores cost[6] = {};

    explicit Block(Call& call) : Block(call, call.split(8)) {}
    Block(Call& call, Call where) : LatticeProblem{} {
        states = 1;
        moves = 3;
        const Move all_moves[] = {{1, 1, 0, 0}, {1, 0, 0, 0}, {0, 1, 0, 0}};
        std::copy(all_moves, all_moves + 3, table);
        starts = ends = {Place::corner, 1};
        is_double = sizeof(S) == sizeof(double);
        scale = -1;
        const Tensor given = call.tensor();
        Call::array<const S>({1, any_size, any_size}, given);
        batch = 1;
        rows = given.shape[1];
        columns = given.shape[2];
        pair[0] = where.integer();
        pair[1] = where.integer();
        width = where.number();
        row = where.integer();
        column = where.integer();
        cost[0] = by_cell(given.numbers);
        scores = cost;
        omega = where.omega();
        threads = int(where.integer());
        lengths = pair;
        band = &width;
        is_last = row + rows == pair[0];
        need(rows > 0 && columns > 0 && row >= 0 && column >= 0 && row % lattice_strip == 0 &&
                 (rows % lattice_strip == 0 || is_last) && row + rows <= pair[0] && column + columns <= pair[1],
             "the block does not fit the pair");
    }

    Scores by_cell(void* numbers) const { return {numbers, rows * columns, columns, 1, all(), 0}; }

    // One of no numbers stands for none; else it is as for all columns up to the last of the block.
    void read_tape(Call& call) {
        const Tensor given = call.tensor();
        double* const numbers = Call::array<double>({1, any_size}, given);
        tape_size = given.shape[1];
        need(tape_size == 0 || tape_size == lattices().tape_size(*this), "the tape does not fit the block");
        tape = tape_size ? numbers : nullptr;
    }
    // A line, which may have any length where there is no neighbour.
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
    need(!by_products || (p.omega.alpha == 1 && sizeof(S) == 4), "products are for negentropy in float");
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
    Scores out[6] = {p.by_cell(call.array<S>({1, p.rows, p.columns}))};
    p.line_above = p.template read_line<const double>(call, p.row > 0);
    p.mass_below = p.template read_line<const double>(call, !p.is_last);
    p.mass_above = p.template read_line<double>(call, p.row > 0);
    return run(lattices().backward, p, &seed, out);
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

// A table of moves. At the end of the arguments: the table, rows, columns, lengths, bands, Ω, threads. The table is
// integers: −1 if scores are costs, else 1; the states; the place and the states, as bits, where paths start, the same
// where they end; the number of moves; for each move, rows, columns, the state it leads from and the one it leads to;
// then what a problem adds.
template <class Problem>
struct OfTable : Problem {
    using Problem::batch, Problem::columns, Problem::rows, Problem::states, Problem::moves, Problem::table;
    using Problem::tape;
    static constexpr int arguments = 8;
    Call index;
    Regions regions;
    std::vector<int64_t> integers;
    const int64_t* next;  // the first integer that was not read

    OfTable(Call last, int64_t batch) : Problem{}, index(last), integers(index.integers()), next(integers.data()) {
        this->batch = batch;
        rows = index.integer();
        columns = index.integer();
        read_table();
        regions.set(*this, index);
        this->omega = index.omega();
        this->threads = threads_for(batch * rows * columns * (moves + 1), int(index.integer()));
    }

    int64_t unread() const { return integers.data() + integers.size() - next; }

    void read_table() {
        need(unread() >= 7, "a table has a sense, states, starts, ends and moves");
        this->scale = double(next[0]);
        need(next[1] > 0 && next[1] <= most_states, "a lattice has up to 8 states");
        states = int(next[1]);
        this->starts = ends_of(next + 2);
        this->ends = ends_of(next + 4);
        need(next[6] >= 0 && next[6] <= most_moves, "a lattice has up to 16 moves");
        moves = int(next[6]);
        next += 7;
        need(unread() >= 4 * moves, "a move has four integers");
        for (int m = 0; m < moves; ++m, next += 4) {
            const int64_t di = next[0], dj = next[1], from = next[2], to = next[3];
            need(di >= 0 && dj >= 0 && from >= 0 && to >= 0 && from < states && to < states, "a move is out of range");
            need(di + dj > 0 || from < to, "a move that stays in its cell must lead to a higher state");
            // A move that is longer than the lattice has no source, whatever its length.
            table[m] = {std::min(di, rows), std::min(dj, columns), int(from), int(to)};
        }
    }

    static Ends ends_of(const int64_t* given) {
        const bool is_place = given[0] >= 0 && given[0] <= int64_t(Place::anywhere);
        need(is_place && given[1] >= 0 && given[1] < 1 << most_states, "there is no such place");
        return {Place(given[0]), std::uint32_t(given[1])};
    }

    // A number for each lattice, in float or double.
    void write_batch(const std::vector<double>& numbers, const Tensor& to) const {
        if (to.kind == Kind::float64) {
            std::copy(numbers.begin(), numbers.end(), Call::array<double>({batch}, to));
        } else {
            std::copy(numbers.begin(), numbers.end(), Call::array<float>({batch}, to));
        }
    }

    // One of no numbers stands for none.
    void read_tape(const Tensor& found, int64_t size) {
        double* const numbers = Call::array<double>({batch, any_size}, found);
        need(found.shape[1] == 0 || found.shape[1] == size, "the tape does not fit the lattice");
        tape = found.shape[1] ? numbers : nullptr;
    }
    void need_tape(const Tensor& found, int64_t size) {
        read_tape(found, size);
        need(tape, "the tape was not kept");
    }
};

// At the beginning of the arguments, a list of arrays of scores, and a tensor whose first size is the batch's. The table
// adds, for each score: the number of its array, −1 for no score; 1 if the array is a window of the cells, else 0; the
// row and the column where the window begins.
struct Lattice : OfTable<LatticeProblem> {
    static constexpr int per_score = 4;
    Tensor first;
    std::vector<Scores> own;

    explicit Lattice(Call& call) : Lattice{call.split(arguments), call.list(), call.tensor()} {}
    Lattice(Call last, const std::vector<PyObject*>& given, const Tensor& first)
        : OfTable(last, first.shape[0]), first(first) {
        need(unread() == per_score * scores_count(), "a lattice has scores of states, moves, starts and ends");
        is_double = Call::is_double(given.data(), given.data() + given.size());
        own = arrays(given, -scale * HUGE_VAL);
        scores = own.data();
        tape_size = lattices().tape_size(*this);
    }

    // Arrays have one entry or all along the batch, the rows and the columns, or are a window of the cells. None is 0, or
    // not wanted. Moves outside of a window score `absent`.
    std::vector<Scores> arrays(const std::vector<PyObject*>& sources, double absent, bool is_written = false) const {
        std::vector<Scores> found(static_cast<std::size_t>(scores_count()));
        for (int n = 0; n < scores_count(); ++n) {
            const int64_t* const read = next + per_score * n;
            need(read[0] < int64_t(sources.size()), "a score has an array");
            if (read[0] < 0 || sources[std::size_t(read[0])] == Py_None) continue;
            const Tensor array = Call::tensor_of(sources[std::size_t(read[0])]);
            if (array.kind != (is_double ? Kind::float64 : Kind::float32)) throw WrongType();
            const int64_t *const sizes = array.shape, full[3] = {batch, rows, columns};
            const bool is_window = read[1] != 0, is_move = n >= states && n < states + moves;
            bool fits = array.dims == 3;
            for (int d = 0; d < 3; ++d) fits = fits && ((is_window && d > 0) || one_or(sizes[d], full[d]));
            need(fits, "scores do not fit the lattice");
            const int64_t size = array.size() * int64_t(is_double ? sizeof(double) : sizeof(float));
            if (is_written) prefer_large_pages(array.numbers, size);
            found[std::size_t(n)] = {array.numbers, sizes[0] == 1 ? 0 : sizes[1] * sizes[2],
                                     is_window ? std::max<int64_t>(sizes[2], 1) : sizes[1] == 1 ? 0 : sizes[2],
                                     sizes[2] == 1 && !is_window ? 0 : 1,
                                     is_window ? Window{read[2], read[3], sizes[1], sizes[2]} : all(),
                                     is_move ? absent : 0};
        }
        return found;
    }
    std::vector<Scores> directions(Call& call) const { return arrays(call.list(), 0); }
    std::vector<Scores> results(Call& call) const { return arrays(call.list(), 0, true); }
};

bool lattice_forward(Call& call) {
    Lattice p(call);
    p.read_tape(call.tensor(), p.tape_size);
    std::vector<double> values(std::size_t(p.batch));
    const bool is_sound = run(lattices().forward, p, values.data());
    p.write_batch(values, p.first);
    return is_sound;
}

bool lattice_backward(Call& call) {
    Lattice p(call);
    p.need_tape(p.first, p.tape_size);
    const auto seed = call.vector<double>(p.batch);
    const auto out = p.results(call);
    return run(lattices().backward, p, seed.data(), out.data());
}

bool lattice_hessian(Call& call) {
    Lattice p(call);
    p.need_tape(p.first, p.tape_size);
    const auto seed = call.vector<double>(p.batch);
    const auto z = p.directions(call), out = p.results(call);
    return run(lattices().hessian, p, seed.data(), z.data(), out.data());
}

template <class Problem>
bool draw(const Problem& p, void (*kernel)(const Problem&, int64_t, const double*, int64_t*), Call& call) {
    const Tensor uniforms = call.tensor();
    const int64_t draws = uniforms.shape[1];
    const double* const numbers = Call::array<const double>({p.batch, draws, p.longest() + 1}, uniforms);
    return run(kernel, p, draws, numbers, call.array<int64_t>({p.batch, draws, p.longest(), 2}));
}

bool lattice_sample(Call& call) {
    Lattice p(call);
    p.need_tape(p.first, p.tape_size);
    return draw<LatticeProblem>(p, lattices().sample, call);
}

// A table whose moves all lead to a later row. At the beginning of the arguments: a tensor whose first size is the
// batch's, lists of scores, labels and masks; before those of the table, the terms (terms, 3 + 9) with the number of a
// score, of a tensor, whether that is a mask, and what three axes follow, offset and place, −1 for no axis; and their
// coefficients. Costs are scores with coefficients of the other sign: then so are values and seeds.
struct Rows : OfTable<RowsProblem> {
    Tensor first;
    std::vector<TermTensor> read;
    std::vector<Tensor> labels;
    std::vector<RowTerm> all;

    explicit Rows(Call& call) : Rows{call.split(arguments), call.split(2), call.tensor(), call} {}
    Rows(Call last, Call given, const Tensor& first, Call& call) : OfTable(last, first.shape[0]), first(first) {
        need(unread() == 0, "the table is too long");
        for (int m = 0; m < moves; ++m) need(table[m].di >= 1, "every move must lead to a later row");
        const auto own = call.list();
        is_double = !own.empty() && Call::tensor_of(own[0]).kind == Kind::float64;
        read = tensors_of(own, is_double ? Kind::float64 : Kind::float32);
        scores_tensors = int(read.size());
        for (PyObject* const one : call.list()) {
            labels.push_back(Call::tensor_of(one));
            Call::array<const int64_t>({batch, any_size}, labels.back());
        }
        const auto masks = tensors_of(call.list(), Kind::boolean);
        read.insert(read.end(), masks.begin(), masks.end());
        read_terms(given);
        terms_count = int(all.size());
        terms = all.data();
        tensors = read.data();
    }
    int64_t tape_size() const { return by_rows().tape_size(*this); }

    std::vector<double> read_seed(Call& call) const {
        auto seed = call.vector<double>(batch);
        for (double& one : seed) one *= scale;
        return seed;
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
    // Tensors of the scores' shapes.
    std::vector<TermTensor> like_scores(Call& call) const {
        const auto found = tensors_of(call.list(), is_double ? Kind::float64 : Kind::float32);
        bool fits = int(found.size()) == scores_tensors;
        for (std::size_t n = 0; fits && n < found.size(); ++n) {
            fits = found[n].dims == read[n].dims && found[n].is_shared == read[n].is_shared &&
                   std::equal(found[n].shape, found[n].shape + found[n].dims, read[n].shape);
        }
        need(fits, "the shapes of tensors do not fit together");
        return found;
    }
    // Those that are to be written.
    std::vector<TermTensor> results(Call& call) const {
        auto found = like_scores(call);
        for (const TermTensor& one : found) {
            const int64_t numbers = (one.is_shared ? 1 : batch) * one.size();
            prefer_large_pages(one.numbers, numbers * int64_t(is_double ? sizeof(double) : sizeof(float)));
        }
        return found;
    }

    void read_terms(Call& given) {
        const Tensor listed = given.tensor();
        const int64_t* row = Call::array<const int64_t>({any_size, 3 + 3 * most_axes}, listed);
        for (const double coefficient : given.numbers()) {
            need(int64_t(all.size()) < listed.shape[0], "there is a coefficient for each term");
            RowTerm term{int(row[0]), int(row[1]), row[2] != 0, scale * coefficient, {}};
            if (term.is_mask) term.tensor += scores_tensors;
            need(row[0] >= 0 && row[0] < scores_count() && term.tensor >= 0 && term.tensor < int(read.size()) &&
                     term.is_mask == (term.tensor >= scores_tensors),
                 "a term is out of range");
            row += 3;
            for (int d = 0; d < most_axes; ++d, row += 3) {
                need((row[0] >= 0) == (d < read[std::size_t(term.tensor)].dims) && row[0] <= int(Follows::nothing),
                     "a term has an axis for each dimension");
                TermAxis& axis = term.axes[d] = {Follows(row[0]), row[1], row[2], nullptr, 0};
                if (axis.follows != Follows::label_of_row && axis.follows != Follows::label_of_column) continue;
                need(row[2] >= 0 && row[2] < int64_t(labels.size()), "a term has labels that are not there");
                axis.labels = static_cast<const int64_t*>(labels[std::size_t(row[2])].numbers);
                axis.labels_count = labels[std::size_t(row[2])].shape[1];
            }
            all.push_back(term);
        }
        need(int64_t(all.size()) == listed.shape[0], "there is a coefficient for each term");
    }
};

bool rows_forward(Call& call) {
    Rows p(call);
    p.read_tape(call.tensor(), p.tape_size());
    std::vector<double> values(std::size_t(p.batch));
    const bool is_sound = run(by_rows().forward, p, values.data());
    for (double& value : values) value *= p.scale;
    p.write_batch(values, p.first);
    return is_sound;
}

bool rows_backward(Call& call) {
    Rows p(call);
    p.need_tape(p.first, p.tape_size());
    const auto seed = p.read_seed(call);
    const auto out = p.results(call);
    return run(by_rows().backward, p, seed.data(), out.data());
}

bool rows_hessian(Call& call) {
    Rows p(call);
    p.need_tape(p.first, p.tape_size());
    const auto seed = p.read_seed(call);
    const auto z = p.like_scores(call), out = p.results(call);
    return run(by_rows().hessian, p, seed.data(), z.data(), out.data());
}

bool rows_sample(Call& call) {
    Rows p(call);
    p.need_tape(p.first, p.tape_size());
    return draw<RowsProblem>(p, by_rows().sample, call);
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
                                 method<rows_forward>("rows_forward"),
                                 method<rows_backward>("rows_backward"),
                                 method<rows_hessian>("rows_hessian"),
                                 method<rows_sample>("rows_sample"),
                                 {}};

}  // namespace bellmax
