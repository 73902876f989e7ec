// The binding of the lattices: dynamic time warping, and tables of moves.
#include <limits>
#include <optional>
#include <type_traits>

#include "../lattice/dtw.h"
#include "../lattice/short_pairs.h"
#include "../lattice/table.h"
#include "common.h"
#include "families.h"

namespace nb = nanobind;

namespace bellmax {
namespace {

template <class S>
const DtwKernels<S>& dtw() {
    static const DtwKernels<S> kernels = BELLMAX_BEST(dtw_kernels<S>());
    return kernels;
}

template <class S>
const ShortPairsKernels<S>& short_pairs() {
    static const ShortPairsKernels<S> kernels = BELLMAX_BEST(short_pairs_kernels<S>());
    return kernels;
}

const LatticeKernels& lattices() {
    static const LatticeKernels kernels = BELLMAX_BEST(lattice_kernels());
    return kernels;
}

template <class S>
using Costs = In<S, 3>;

// The lengths and the band of each pair: without them, those of whole matrices.
struct Regions {
    std::vector<int64_t> all;
    std::vector<double> none;
    const int64_t* lengths;
    const double* band;

    Regions(const std::optional<In<int64_t, 2>>& given, const std::optional<In<double, 1>>& bands, int64_t batch,
            int64_t rows, int64_t columns) {
        need(given.has_value() == bands.has_value(), "lengths come with bands");
        if (!given) {
            for (int64_t b = 0; b < batch; ++b) all.insert(all.end(), {rows, columns});
            none.assign(std::size_t(batch), std::numeric_limits<double>::infinity());
            lengths = all.data();
            band = none.data();
            return;
        }
        lengths = given->data();
        band = bands->data();
        need(int64_t(given->shape(0)) == batch && given->shape(1) == 2 && int64_t(bands->shape(0)) == batch,
             "the index does not fit the cost");
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t *const own = lengths + 2 * b;
            need(own[0] >= 1 && own[0] <= rows && own[1] >= 1 && own[1] <= columns, "a length is out of range");
            need(band[b] >= 0, "a band is negative");
        }
    }
};

#define PAIRS const std::optional<In<int64_t, 2>>&lengths, const std::optional<In<double, 1>>&band, OMEGA
#define DTW_PROBLEM(tape)                                                                                      \
    const Regions regions(lengths, band, int64_t(cost.shape(0)), int64_t(cost.shape(1)), int64_t(cost.shape(2))); \
    const auto p = dtw_problem<S>(cost, regions, tape, omega, parameters, threads)

template <class S, class Tape>
DtwProblem<S> dtw_problem(const Costs<S>& cost, const Regions& regions, const Tape& tape, OMEGA) {
    const int64_t batch = int64_t(cost.shape(0)), rows = int64_t(cost.shape(1)), columns = int64_t(cost.shape(2));
    need(rows > 0 && columns > 0, "the cost is empty");
    const int64_t size = int64_t(tape.shape(1));
    need(int64_t(tape.shape(0)) == batch && (size == 0 || size == dtw_tape_size(rows, columns)),
         "the tape does not fit the cost");
    return {batch, rows, columns, regions.lengths, regions.band, omega_of(omega, parameters),
            threads_for(int64_t(cost.size()), threads), cost.data(), size ? const_cast<double*>(tape.data()) : nullptr};
}

template <class S, class A>
void need_like(const DtwProblem<S>& p, const A& array) {
    need(array.shape(0) == p.batch && array.shape(1) == p.rows && array.shape(2) == p.columns,
         "an array is not like the cost");
    if constexpr (!std::is_const_v<typename A::Scalar>) prefer_large_pages(array.data(), int64_t(array.nbytes()));
}

template <class S>
void need_seed(const DtwProblem<S>& p, const In<S, 1>& seed) {
    need(int64_t(seed.shape(0)) == p.batch, "a number for each pair is needed");
    need(p.tape != nullptr, "the tape was not kept");
}

using Line = In<double, 1>;

// A block of rows of one pair, and what it exchanges with its neighbours: lines as long as the pair's rows.
template <class S>
DtwProblem<S> dtw_block(const Costs<S>& cost, const In<double, 2>& tape, const Line& line_above, int64_t rows,
                        int64_t columns, double band, int64_t row, int64_t column, OMEGA, int64_t* lengths,
                        double* bands) {
    lengths[0] = rows;
    lengths[1] = columns;
    bands[0] = band;
    const int64_t height = int64_t(cost.shape(1)), width = int64_t(cost.shape(2)), size = int64_t(tape.shape(1));
    need(cost.shape(0) == 1 && tape.shape(0) == 1 && row % dtw_strip == 0 && row + height <= rows && column >= 0 &&
             (height % dtw_strip == 0 || row + height == rows) && column + width <= columns && height > 0 && width > 0,
         "the block does not fit the pair");
    need(size == 0 || size == dtw_tape_size(height, column + width), "the tape does not fit the block");
    need(row == 0 || int64_t(line_above.shape(0)) == columns, "a line is not as long as the pair's rows");
    DtwProblem<S> p{1, height, width, lengths, bands, omega_of(omega, parameters), threads, cost.data(),
                    size ? const_cast<double*>(tape.data()) : nullptr};
    p.row = row;
    p.column = column;
    p.line_above = row ? line_above.data() : nullptr;
    return p;
}

#define BLOCK int64_t rows, int64_t columns, double band, int64_t row, int64_t column, OMEGA
#define DTW_BLOCK                                                                                                     \
    int64_t lengths[2];                                                                                               \
    double bands[1];                                                                                                  \
    auto p = dtw_block(cost, In<double, 2>(tape), line_above, rows, columns, band, row, column, omega, parameters,    \
                       threads, lengths, bands);                                                                      \
    const bool is_last = row + p.rows == rows

template <class S>
void bind_blocks(nb::module_& m) {
    m.def("dtw_forward_block", [](const Costs<S>& cost, const Out<S, 1>& value, const Out<S, 1>& greatest,
                                  const Out<double, 2>& tape, const Line& line_above, const Out<double, 1>& line_below,
                                  bool by_products, BLOCK) {
        DTW_BLOCK;
        need(value.shape(0) == 1 && greatest.shape(0) == 1, "a number for each pair is needed");
        need(!by_products || (p.omega.alpha == 1 && sizeof(S) == 4), "products are for negentropy in float");
        need(is_last || int64_t(line_below.shape(0)) == columns, "a line is not as long as the pair's rows");
        p.line_below = is_last ? nullptr : line_below.data();
        p.by_products = by_products;
        nb::gil_scoped_release release;
        return dtw<S>().forward_block(p, value.data(), greatest.data());
    });
    m.def("dtw_backward_block", [](const Costs<S>& cost, const In<double, 2>& tape, const In<S, 1>& seed,
                                   const Out<S, 3>& out, const Line& line_above, const Line& mass_below,
                                   const Out<double, 1>& mass_above, BLOCK) {
        DTW_BLOCK;
        need_seed(p, seed);
        need_like(p, out);
        need((is_last || mass_below.shape(0) == columns) && (row == 0 || mass_above.shape(0) == columns),
             "a line is not as long as the pair's rows");
        p.mass_below = mass_below.data();
        p.mass_above = mass_above.data();
        nb::gil_scoped_release release;
        dtw<S>().backward(p, seed.data(), out.data());
    });
}

template <class S>
void bind_dtw(nb::module_& m) {
    m.def("dtw_forward", [](const Costs<S>& cost, const Out<S, 1>& value, const Out<double, 2>& tape, PAIRS) {
        DTW_PROBLEM(tape);
        need(int64_t(value.shape(0)) == p.batch, "a number for each pair is needed");
        nb::gil_scoped_release release;
        return dtw<S>().forward(p, value.data());
    });
    m.def("dtw_backward",
          [](const Costs<S>& cost, const In<double, 2>& tape, const In<S, 1>& seed, const Out<S, 3>& out, PAIRS) {
              DTW_PROBLEM(tape);
              need_seed(p, seed);
              need_like(p, out);
              nb::gil_scoped_release release;
              dtw<S>().backward(p, seed.data(), out.data());
          });
    m.def("dtw_hessian", [](const Costs<S>& cost, const In<double, 2>& tape, const In<S, 1>& seed, const Costs<S>& z,
                            const Out<S, 3>& out, PAIRS) {
        DTW_PROBLEM(tape);
        need_seed(p, seed);
        need_like(p, z);
        need_like(p, out);
        nb::gil_scoped_release release;
        dtw<S>().hessian(p, seed.data(), z.data(), out.data());
    });
    m.def("dtw_sample", [](const Costs<S>& cost, const In<double, 2>& tape, const In<double, 3>& uniforms,
                           const Out<int64_t, 3>& paths, PAIRS) {
        DTW_PROBLEM(tape);
        need(p.tape != nullptr, "the tape was not kept");
        need(int64_t(uniforms.shape(0)) == p.batch && int64_t(uniforms.shape(2)) == p.rows + p.columns - 2 &&
                 int64_t(paths.shape(0)) == p.batch && paths.shape(1) == uniforms.shape(1) &&
                 int64_t(paths.shape(2)) == p.rows + p.columns - 1,
             "the paths do not fit the uniforms");
        nb::gil_scoped_release release;
        dtw<S>().sample(p, int64_t(uniforms.shape(1)), uniforms.data(), paths.data());
    });
}

template <class S>
Series<S> series(const Costs<S>& numbers, const In<int64_t, 1>& lengths) {
    const int64_t count = int64_t(numbers.shape(0)), length = int64_t(numbers.shape(1));
    need(int64_t(lengths.shape(0)) == count, "the lengths do not fit the series");
    for (int64_t k = 0; k < count; ++k) {
        need(lengths.data()[k] >= 1 && lengths.data()[k] <= length, "a length is out of range");
    }
    return {count, length, int64_t(numbers.shape(2)), numbers.data(), lengths.data()};
}

template <class S>
void bind_short_pairs(nb::module_& m) {
    m.def("dtw_short_pairs", [](const Costs<S>& x, const In<int64_t, 1>& lengths_x, const Costs<S>& y,
                                const In<int64_t, 1>& lengths_y, const In<int64_t, 1>& first,
                                const In<int64_t, 1>& second, const Out<S, 1>& values, int power, double scale, OMEGA) {
        const int64_t pairs = int64_t(first.shape(0));
        const Series<S> a = series(x, lengths_x), b = series(y, lengths_y);
        need(a.features == b.features && (power == 1 || power == 2), "the series do not fit together");
        need(int64_t(second.shape(0)) == pairs && int64_t(values.shape(0)) == pairs, "the pairs do not fit together");
        for (int64_t n = 0; n < pairs; ++n) {
            const int64_t one = first.data()[n], other = second.data()[n];
            need(one >= 0 && one < a.count && other >= 0 && other < b.count, "a pair names no series");
        }
        const ShortPairs<S> p{a, b, pairs, first.data(), second.data(), power, scale, omega_of(omega, parameters),
                              threads_for(pairs * a.length * b.length, threads)};
        nb::gil_scoped_release release;
        short_pairs<S>().values(p, values.data());
    });
}

// An array for each score, of one entry or all along the batch, the rows and the columns; None is 0, or is not wanted.
template <class View>
using Arrays = std::vector<std::optional<View>>;

// A lattice by its table, with all that a problem points to.
struct Lattice {
    Regions regions;
    std::vector<Scores> own;
    LatticeProblem p;

    template <class View>
    std::vector<Scores> scores_of(const Arrays<View>& arrays) const {
        using S = std::remove_const_t<typename View::Scalar>;
        need(int64_t(arrays.size()) == p.scores_count(), "a lattice has scores of states, moves, starts and ends");
        std::vector<Scores> all;
        for (const auto& array : arrays) {
            if (!array) {
                all.push_back({nullptr, 0, 0, 0});
                continue;
            }
            const int64_t sizes[3] = {array->shape(0), array->shape(1), array->shape(2)};
            const int64_t full[3] = {p.batch, p.rows, p.columns};
            for (int d = 0; d < 3; ++d) need(sizes[d] == 1 || sizes[d] == full[d], "scores do not fit the lattice");
            all.push_back({const_cast<S*>(array->data()), sizes[0] == 1 ? 0 : sizes[1] * sizes[2],
                           sizes[1] == 1 ? 0 : sizes[2], sizes[2] == 1 ? 0 : 1});
        }
        return all;
    }

    void set_moves(const In<int64_t, 2>& moves) {
        need(moves.shape(0) <= most_moves && moves.shape(1) == 4, "moves are up to 16 rows of di, dj, from, to");
        p.moves = int(moves.shape(0));
        for (int m = 0; m < p.moves; ++m) {
            const int64_t *const move = moves.data() + 4 * m, di = move[0], dj = move[1], from = move[2], to = move[3];
            need(di >= 0 && dj >= 0 && from >= 0 && to >= 0 && from < p.states && to < p.states,
                 "a move is out of range");
            need(di + dj > 0 || from < to, "a move that stays in its cell must lead to a higher state");
            // One that is longer than the lattice has no source, whatever its length.
            p.table[m] = {std::min(di, p.rows), std::min(dj, p.columns), int(from), int(to)};
        }
    }
};

Ends ends_of(const char* place, int64_t states) {
    const std::string name(place);
    const char* const names[] = {"corner", "row", "column", "anywhere"};
    int n = 0;
    while (n < 4 && name != names[n]) ++n;
    need(n < 4 && states >= 0 && states < 1 << most_states, "no such place");
    return {Place(n), std::uint32_t(states)};
}

#define TABLE                                                                                                        \
    int64_t rows, int64_t columns, int states, const In<int64_t, 2>&moves, const char *start, int64_t start_states, \
        const char *end, int64_t end_states, PAIRS
#define LATTICE(batch)                                                                                               \
    Lattice lattice{Regions(lengths, band, batch, rows, columns), {}, {}};                                           \
    set_lattice(lattice, scores, tape, batch, rows, columns, states, moves, ends_of(start, start_states),            \
                ends_of(end, end_states), omega, parameters, threads);                                               \
    const LatticeProblem& p = lattice.p

template <class S, class Tape>
void set_lattice(Lattice& lattice, const Arrays<In<S, 3>>& scores, const Tape& tape, int64_t batch, int64_t rows,
                 int64_t columns, int states, const In<int64_t, 2>& moves, Ends starts, Ends ends, OMEGA) {
    LatticeProblem& p = lattice.p;
    need(rows > 0 && columns > 0 && states > 0 && states <= most_states,
         "a lattice has rows, columns and up to 8 states");
    need(tape.shape(0) == batch && tape.shape(1) == 2 && tape.shape(2) == rows * columns * states,
         "the tape does not fit the lattice");
    p.batch = batch;
    p.rows = rows;
    p.columns = columns;
    p.states = states;
    lattice.set_moves(moves);
    p.starts = starts;
    p.ends = ends;
    p.lengths = lattice.regions.lengths;
    p.band = lattice.regions.band;
    p.omega = omega_of(omega, parameters);
    p.threads = threads_for(batch * rows * columns * (p.moves + 1), threads);
    p.is_double = sizeof(S) == sizeof(double);
    lattice.own = lattice.scores_of(scores);
    p.scores = lattice.own.data();
    p.tape = const_cast<double*>(tape.data());
}

template <class S>
void bind_tables(nb::module_& m) {
    m.def("lattice_forward", [](const Arrays<In<S, 3>>& scores, const Out<double, 1>& value, const Out<double, 3>& tape,
                                TABLE) {
        LATTICE(value.shape(0));
        nb::gil_scoped_release release;
        return lattices().forward(p, value.data());
    });
    m.def("lattice_backward", [](const Arrays<In<S, 3>>& scores, const In<double, 3>& tape, const In<double, 1>& seed,
                                 const Arrays<Out<S, 3>>& out, TABLE) {
        LATTICE(seed.shape(0));
        const auto gradients = lattice.scores_of(out);
        nb::gil_scoped_release release;
        lattices().backward(p, seed.data(), gradients.data());
    });
    m.def("lattice_hessian", [](const Arrays<In<S, 3>>& scores, const In<double, 3>& tape, const In<double, 1>& seed,
                                const Arrays<In<S, 3>>& z, const Arrays<Out<S, 3>>& out, TABLE) {
        LATTICE(seed.shape(0));
        const auto direction = lattice.scores_of(z), products = lattice.scores_of(out);
        nb::gil_scoped_release release;
        lattices().hessian(p, seed.data(), direction.data(), products.data());
    });
    m.def("lattice_sample", [](const Arrays<In<S, 3>>& scores, const In<double, 3>& tape, const In<double, 3>& uniforms,
                               const Out<int64_t, 4>& paths, TABLE) {
        LATTICE(uniforms.shape(0));
        need(uniforms.shape(2) == p.longest() + 1 && paths.shape(0) == p.batch && paths.shape(1) == uniforms.shape(1) &&
                 paths.shape(2) == p.longest() && paths.shape(3) == 2,
             "the paths do not fit the uniforms");
        nb::gil_scoped_release release;
        lattices().sample(p, uniforms.shape(1), uniforms.data(), paths.data());
    });
}

}  // namespace

void bind_lattice(nb::module_& m) {
    bind_dtw<float>(m);
    bind_dtw<double>(m);
    bind_blocks<float>(m);
    bind_blocks<double>(m);
    bind_short_pairs<float>(m);
    bind_short_pairs<double>(m);
    bind_tables<float>(m);
    bind_tables<double>(m);
    m.def("dtw_tape_size", &dtw_tape_size);
    m.def("dtw_fits_products", dtw<float>().fits_products);
}

}  // namespace bellmax
