// Lattices: dynamic time warping, many short pairs, and tables of moves.
#include <cmath>
#include <string>

#include "../lattice/dtw.h"
#include "../lattice/short_pairs.h"
#include "../table/table.h"
#include "call.h"

namespace bellmax {
namespace {

template <class S>
const DtwKernels<S>& dtw() {
    static const DtwKernels<S> best = BELLMAX_BEST(dtw_kernels<S>());
    return best;
}

const LatticeKernels& lattices() {
    static const LatticeKernels best = BELLMAX_BEST(lattice_kernels());
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

template <class S>
struct Dtw : DtwProblem<S> {
    Dtw() : DtwProblem<S>{} {}

    void read_cost(Call& call) {
        const Tensor given = call.tensor();
        this->cost = Call::array<const S>({any_size, any_size, any_size}, given);
        this->batch = given.shape[0];
        this->rows = given.shape[1];
        this->columns = given.shape[2];
    }

    // One of no numbers stands for none. Of a block, it is as for all columns up to its last.
    void read_tape(Call& call) {
        const Tensor given = call.tensor();
        double* const numbers = Call::array<double>({this->batch, any_size}, given);
        const int64_t size = given.shape[1];
        need(size == 0 || size == dtw_tape_size(this->rows, this->column + this->columns),
             "the tape does not fit the cost");
        this->tape = size ? numbers : nullptr;
    }

    const S* read_seed(Call& call) const {
        need(this->tape, "the tape was not kept");
        return call.array<const S>({this->batch});
    }

    template <class T>
    T* like_cost(Call& call) const {
        return call.array<T>({this->batch, this->rows, this->columns});
    }
};

// At the end of the arguments: lengths, bands, Ω, threads.
template <class S>
struct Pairs : Dtw<S> {
    Regions regions;

    explicit Pairs(Call& call) {
        Call index = call.split(5);
        this->read_cost(call);
        regions.set(*this, index);
        this->omega = index.omega();
        this->threads = threads_for(this->batch * this->rows * this->columns, int(index.integer()));
    }
};

template <class S>
bool dtw_forward(Call& call) {
    Pairs<S> p(call);
    S* const value = call.array<S>({p.batch});
    p.read_tape(call);
    return run(dtw<S>().forward, p, value);
}

template <class S>
bool dtw_backward(Call& call) {
    Pairs<S> p(call);
    p.read_tape(call);
    const S* const seed = p.read_seed(call);
    return run(dtw<S>().backward, p, seed, p.template like_cost<S>(call));
}

template <class S>
bool dtw_hessian(Call& call) {
    Pairs<S> p(call);
    p.read_tape(call);
    const S* const seed = p.read_seed(call);
    const S* const z = p.template like_cost<const S>(call);
    return run(dtw<S>().hessian, p, seed, z, p.template like_cost<S>(call));
}

template <class S>
bool dtw_sample(Call& call) {
    Pairs<S> p(call);
    p.read_tape(call);
    need(p.tape, "the tape was not kept");
    const Tensor uniforms = call.tensor();
    const int64_t draws = uniforms.shape[1], longest = p.rows + p.columns - 1;
    const double* const numbers = Call::array<const double>({p.batch, draws, longest - 1}, uniforms);
    return run(dtw<S>().sample, p, draws, numbers, call.array<int64_t>({p.batch, draws, longest}));
}

// A block of rows of one pair, and what it exchanges with its neighbours: lines as long as the pair's rows. At the end
// of the arguments: the rows, the columns and the band of the pair, the first row and column of the block, Ω, threads.
template <class S>
struct Block : Dtw<S> {
    int64_t lengths_[2];
    double band_;
    bool is_last;

    explicit Block(Call& call) {
        Call where = call.split(8);
        this->read_cost(call);
        lengths_[0] = where.integer();
        lengths_[1] = where.integer();
        band_ = where.number();
        this->row = where.integer();
        this->column = where.integer();
        this->omega = where.omega();
        this->threads = int(where.integer());
        this->lengths = lengths_;
        this->band = &band_;
        is_last = this->row + this->rows == lengths_[0];
        need(this->batch == 1 && this->rows > 0 && this->columns > 0 && this->row >= 0 && this->column >= 0 &&
                 this->row % dtw_strip == 0 && (this->rows % dtw_strip == 0 || is_last) &&
                 this->row + this->rows <= lengths_[0] && this->column + this->columns <= lengths_[1],
             "the block does not fit the pair");
    }

    // A line, which may have any length where there is no neighbour.
    template <class T>
    T* read_line(Call& call, bool has_neighbour) const {
        T* const line = call.array<T>({has_neighbour ? lengths_[1] : any_size});
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
    p.by_products = call.integer();
    need(!p.by_products || (p.omega.alpha == 1 && sizeof(S) == 4), "products are for negentropy in float");
    return run(dtw<S>().forward_block, p, value, greatest);
}

template <class S>
bool dtw_backward_block(Call& call) {
    Block<S> p(call);
    p.read_tape(call);
    const S* const seed = p.read_seed(call);
    S* const out = p.template like_cost<S>(call);
    p.line_above = p.template read_line<const double>(call, p.row > 0);
    p.mass_below = p.template read_line<const double>(call, !p.is_last);
    p.mass_above = p.template read_line<double>(call, p.row > 0);
    return run(dtw<S>().backward, p, seed, out);
}

bool dtw_fits_products(Call& call) {
    const double greatest = call.number();
    return dtw<float>().fits_products(greatest, call.integer());
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

// A table of moves. At the end of the arguments: rows, columns, states, moves (moves, 4), the place and the states, as
// bits, where paths start, the same where they end, lengths, bands, Ω, threads; at the beginning, the scores, and
// a tensor whose first size is the batch's.
struct Lattice : LatticeProblem {
    Call index;
    std::vector<PyObject*> given;
    Tensor first;
    std::vector<Scores> own;
    Regions regions;

    explicit Lattice(Call& call) : LatticeProblem{}, index(call.split(13)), given(call.list()), first(call.tensor()) {
        read_table();
        regions.set(*this, index);
        omega = index.omega();
        threads = threads_for(batch * rows * columns * (moves + 1), int(index.integer()));
        for (PyObject* const one : given) is_double |= one != Py_None && Call::tensor_of(one).kind == Kind::float64;
        own = arrays(given);
        scores = own.data();
    }

    void read_table() {
        batch = first.shape[0];
        rows = index.integer();
        columns = index.integer();
        const int64_t given_states = index.integer();
        need(given_states > 0 && given_states <= most_states, "a lattice has up to 8 states");
        states = int(given_states);
        read_moves();
        starts = read_ends();
        ends = read_ends();
    }

    void read_moves() {
        const Tensor all = index.tensor();
        const int64_t* move = Call::array<const int64_t>({any_size, 4}, all);
        need(all.shape[0] <= most_moves, "a lattice has up to 16 moves");
        moves = int(all.shape[0]);
        for (int m = 0; m < moves; ++m, move += 4) {
            const int64_t di = move[0], dj = move[1], from = move[2], to = move[3];
            need(di >= 0 && dj >= 0 && from >= 0 && to >= 0 && from < states && to < states, "a move is out of range");
            need(di + dj > 0 || from < to, "a move that stays in its cell must lead to a higher state");
            // One that is longer than the lattice has no source, whatever its length.
            table[m] = {std::min(di, rows), std::min(dj, columns), int(from), int(to)};
        }
    }

    Ends read_ends() {
        const std::string name(index.text());
        const int64_t bits = index.integer();
        const char* const names[] = {"corner", "row", "column", "anywhere"};
        int n = 0;
        while (n < 4 && name != names[n]) ++n;
        need(n < 4 && bits >= 0 && bits < 1 << most_states, "there is no such place");
        return {Place(n), std::uint32_t(bits)};
    }

    // An array for each score, of one entry or all along the batch, the rows and the columns; None is 0, or not wanted.
    std::vector<Scores> arrays(const std::vector<PyObject*>& sources) const {
        need(int64_t(sources.size()) == scores_count(), "a lattice has scores of states, moves, starts and ends");
        std::vector<Scores> all;
        for (PyObject* const source : sources) {
            if (source == Py_None) {
                all.push_back({nullptr, 0, 0, 0});
                continue;
            }
            const Tensor array = Call::tensor_of(source);
            const int64_t *const sizes = array.shape, full[3] = {batch, rows, columns};
            if (array.kind != (is_double ? Kind::float64 : Kind::float32)) throw WrongType();
            need(array.dims == 3, "scores do not fit the lattice");
            for (int d = 0; d < 3; ++d) need(one_or(sizes[d], full[d]), "scores do not fit the lattice");
            all.push_back({array.numbers, sizes[0] == 1 ? 0 : sizes[1] * sizes[2], sizes[1] == 1 ? 0 : sizes[2],
                           sizes[2] == 1 ? 0 : 1});
        }
        return all;
    }

    // One of no numbers stands for none.
    void read_tape(const Tensor& found) {
        double* const numbers = Call::array<double>({batch, any_size}, found);
        need(found.shape[1] == 0 || found.shape[1] == lattices().tape_size(*this), "the tape does not fit the lattice");
        tape = found.shape[1] ? numbers : nullptr;
    }
    void need_tape() const { need(tape, "the tape was not kept"); }
};

bool lattice_forward(Call& call) {
    Lattice p(call);
    p.read_tape(call.tensor());
    return run(lattices().forward, p, Call::array<double>({p.batch}, p.first));
}

bool lattice_backward(Call& call) {
    Lattice p(call);
    p.read_tape(p.first);
    p.need_tape();
    const double* const seed = call.array<const double>({p.batch});
    const auto out = p.arrays(call.list());
    return run(lattices().backward, p, seed, out.data());
}

bool lattice_hessian(Call& call) {
    Lattice p(call);
    p.read_tape(p.first);
    p.need_tape();
    const double* const seed = call.array<const double>({p.batch});
    const auto z = p.arrays(call.list()), out = p.arrays(call.list());
    return run(lattices().hessian, p, seed, z.data(), out.data());
}

bool lattice_sample(Call& call) {
    Lattice p(call);
    p.read_tape(p.first);
    p.need_tape();
    const Tensor uniforms = call.tensor();
    const int64_t draws = uniforms.shape[1];
    const double* const numbers = Call::array<const double>({p.batch, draws, p.longest() + 1}, uniforms);
    return run(lattices().sample, p, draws, numbers, call.array<int64_t>({p.batch, draws, p.longest(), 2}));
}

#define BOTH(name) method<name<float>, name<double>>(#name)

}  // namespace

PyMethodDef lattice_methods[] = {BOTH(dtw_forward),
                                 BOTH(dtw_backward),
                                 BOTH(dtw_hessian),
                                 BOTH(dtw_sample),
                                 BOTH(dtw_forward_block),
                                 BOTH(dtw_backward_block),
                                 BOTH(dtw_short_pairs),
                                 method<dtw_fits_products>("dtw_fits_products"),
                                 method<lattice_forward>("lattice_forward"),
                                 method<lattice_backward>("lattice_backward"),
                                 method<lattice_hessian>("lattice_hessian"),
                                 method<lattice_sample>("lattice_sample"),
                                 {}};

}  // namespace bellmax
