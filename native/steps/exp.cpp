// A chain as products of matrices and vectors. With W[i, p] = exp(transitions[i, p] − r_i), r_i the greatest of row i,
// the forward sweep keeps a_n ∝ exp(v_n) and s_n = W a_{n−1} of every step. Backward, the marginals m_n give
// u_n = m_n / s_n and m_{n−1} = a_{n−1} ∘ Wᵀu_n without another exp, and the transitions get W ∘ Σ_n u_n a_{n−1}ᵀ.
#include "exp.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "../base/threads.h"
#include "../omega/negentropy.h"
#include "exp_layout.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace in_exp_space {
namespace {

template <class S>
constexpr S unit = omega::Negentropy<S>::unit;
// A state that is reached and has less than this, where the greatest is about 1, may lose what leads through it.
template <class S>
constexpr S least = sizeof(S) == 4 ? S(1e-28) : S(1e-280);
// Where no weight of an edge is less than this, a sum over edges from states that have more is 0 only if there are
// none.
template <class S>
constexpr S least_weight = sizeof(S) == 4 ? S(1e-9) : S(1e-20);
// A state that underflows never matters if all transitions, relative to the greatest of all, are at least this number
// w. The greatest state of a step has at least w, so the lost state has at most ε/w of it, where ε is the least positive
// number. The paths that continue from the lost state weigh at most 1/w times the paths that continue from any other
// state, whatever the emissions are. So at most ε/w² of the value is lost.
template <class S>
constexpr S least_dense = sizeof(S) == 4 ? S(1e-12) : S(1e-140);

// Up to this number of states, backward computes s again from a: faster than to write s to the tape and read it.
constexpr int64_t most_states_to_sum = 16;
// With fewer states, log space in float is as fast as products in double, and its Hessian products are faster.
constexpr int64_t least_states_in_double = 4;
// The mark of the tape (problem.h) if a is of type Real.
template <class S, class Real>
constexpr S mark = sizeof(S) == sizeof(Real) ? S(1) : S(2);

template <class S>
using Ints = typename Shape<Vec<S>>::Int;

// Sequences that are swept together, the longest first. A place without a sequence has length 0.
template <class S, class Real>
struct Group {
    static constexpr int lanes = lanes_of<Real>, most = Layout<Real>::most_sequences;
    static constexpr int64_t planes = 2 * sizeof(S) / sizeof(Real);  // of Real, on the tape of a sequence
    using Int = typename Format<Real>::Int;

    const ScoresProblem<S>& problem;
    const Layout<Real>& layout;
    int members;
    int64_t longest, b[most], length[most];
    Ints<Real> lengths[Layout<Real>::most_rows];  // by row

    Group(const ScoresProblem<S>& of, const Layout<Real>& in, const int64_t* order, int64_t count)
        : problem(of), layout(in), members(int(count)), longest(of.lengths[order[0]]) {
        for (int l = 0; l < layout.sequences; ++l) {
            b[l] = order[l < members ? l : 0];
            length[l] = l < members ? problem.lengths[b[l]] : 0;
            layout.set(lengths, l, Int(length[l]));
        }
    }

    // True if the forward sweep writes s to the tape, not a alone.
    bool keeps_sums() const { return planes == 2 && problem.states > most_states_to_sum; }
    const Real* tape() const { return reinterpret_cast<const Real*>(problem.tape); }

    // Where the numbers of visit n of sequence l are: on the tape, a (plane 0) or s (1), or in something of the
    // emissions' shape (visits).
    static constexpr int visits = -1;
    int64_t row(int plane, int l, int64_t n) const {
        if (plane != visits) return ((b[l] * planes + plane) * (problem.steps + 1) + n + 1) * problem.states;
        int64_t step = n;
        if (problem.kept) step = length[l] ? visited(problem, b[l], std::min(n, length[l] - 1)) : 0;
        return (b[l] * problem.steps + step) * problem.states;
    }
    // So many visits lie one after another.
    int64_t run(int plane, int64_t steps) const { return plane == visits && problem.kept ? 1 : steps; }

    // Reads visits n … n + steps − 1; 0 where a sequence has ended.
    template <class T>
    __attribute__((noinline)) void read(const T* data, int plane, int64_t n, int64_t steps, Vec<Real> pad,
                                        Real* to) const {
        for (int64_t k = 0; k < steps; k += run(plane, steps)) {
            gather([&](int l) { return data + row(plane, l, n + k); }, run(plane, steps), pad, to + k * layout.stride);
        }
        for (int64_t k = std::max<int64_t>(0, length[layout.sequences - 1] - n); k < steps; ++k) {
            for (int r = 0; r < layout.rows; ++r) {
                Real* at = to + k * layout.stride + r * layout.row_stride;
                const auto on = lengths[r] > Ints<Real>{} + Int(n + k);
                for (int64_t v = 0; v < layout.width; ++v, at += layout.gap) {
                    store<Real>(at, on ? load<Real>(at) : Vec<Real>{});
                }
            }
        }
    }
    // What there is once for each sequence, or for all, as a step.
    void read_once(const S* numbers, int64_t batch, Vec<Real> pad, Real* to) const {
        gather([&](int l) { return numbers + b[l] * batch; }, 1, pad, to);
    }

    // Writes visits n … n + steps − 1; where a sequence has ended, nothing or what stands there.
    template <class T>
    __attribute__((noinline)) void write(const Real* from, int64_t n, int64_t steps, int plane, T* data) const {
        int alive = members;
        for (int64_t k = 0; k < steps; k += run(plane, steps)) {
            while (alive > 0 && length[alive - 1] <= n + k) --alive;
            for (int r = 0; r < layout.rows && layout.first_of(r) < alive; ++r) {
                const int first = layout.first_of(r), valid = layout.across ? std::min(lanes, alive - first) : 1;
                T* to[lanes];
                for (int l = 0; l < valid; ++l) to[l] = data + row(plane, first + l, n + k);
                layout.scatter(to, valid, run(plane, steps), from + k * layout.stride + r * layout.row_stride);
            }
        }
    }

private:
    template <class Place>
    void gather(Place place, int64_t steps, Vec<Real> pad, Real* to) const {
        for (int r = 0; r < layout.rows; ++r) {
            decltype(place(0)) from[lanes];
            for (int l = 0; l < (layout.across ? lanes : 1); ++l) from[l] = place(layout.first_of(r) + l);
            layout.gather(from, steps, pad, to + r * layout.row_stride);
        }
    }
};

// In place of the scores of a row exp(x − greatest + shift), 0 for −∞ alone; without a shift, (x − greatest) · unit.
// Returns the greatest, a finite number. A score that is +∞ or NaN is `bad`.
template <class S>
__attribute__((noinline)) Vec<S> exponentiate(const Layout<S>& layout, S* __restrict row, const S* __restrict shift,
                                              Ints<S>& bad) {
    const int64_t end = layout.width * layout.gap, gap = layout.gap;
    Vec<S> top = broadcast(std::numeric_limits<S>::lowest());
    Ints<S> good = ~Ints<S>{};
    for (int64_t at = 0; at < end; at += gap) {
        const Vec<S> x = load<S>(row + at);
        good &= x < infinity<S>;
        top = greater<S>(top, x);
    }
    bad |= ~good;
    top = layout.greatest(top);
    const Vec<S> tiny = broadcast(std::numeric_limits<S>::min());
    for (int64_t at = 0; at < end; at += gap) {
        const Vec<S> relative = (load<S>(row + at) - top) * unit<S>;
        const Vec<S> x = shift ? relative + load<S>(shift + at) : relative;
        store<S>(row + at, !shift ? x : x > -infinity<S> ? greater<S>(exp2_of(x), tiny) : Vec<S>{});
    }
    return top;
}

// W; r_i relative to their greatest and in units of log 2, −∞ past the last state, as a step; that greatest.
template <class S>
struct Weights : PackedMatrix<S> {
    Array<S> shift;
    S base = 0;
    bool is_moderate = true;  // no weight of an edge is very small
    bool is_dense = true;     // no transition is nearly closed: `least_dense`

    explicit Weights(const Layout<S>& of) : PackedMatrix<S>(of), shift(filled<S>(of.stride, -infinity<S>)) {}

    // Whether all transitions were below +∞ and not NaN.
    template <class T>
    bool fill(const T* transitions) {
        constexpr S none = std::numeric_limits<S>::lowest();  // for a row of −∞
        const Layout<S>& layout = this->layout;
        const Layout<S> line(layout.states, false, 1);
        const Array<S> greatest = scratch<S>(layout.states), zero = zeros<S>(layout.padded);
        const Array<S> least_of_row = scratch<S>(layout.states);
        Ints<S> bad{}, small{};
        base = none;
        is_dense = true;
        for (int64_t i = 0; i < layout.states; ++i) {
            const T* from = transitions + i * layout.states;
            S* row = &this->rows[i * layout.padded];
            line.gather(&from, 1, line.low, row);
            greatest[i] = exponentiate<S>(line, row, zero.get(), bad)[0];
            for (int64_t v = 0; v < line.width; ++v) {
                const Vec<S> weight = load<S>(row + v * line.gap);
                small |= (weight > S(0)) & (weight < least_weight<S>);
            }
            least_of_row[i] = *std::min_element(row, row + layout.states);
            base = std::max(greatest[i], base);
        }
        if (base == none) base = 0;
        for (int64_t i = 0; i < layout.states; ++i) {
            const S relative = greatest[i] == none ? -infinity<S> : (greatest[i] - base) * unit<S>;
            is_dense &= least_of_row[i] * std::exp2(relative) >= least_dense<S>;
            for (int l = 0; l < layout.sequences; ++l) shift[layout.place(l, i)] = relative;
        }
        is_moderate = !any(small);
        return !any(bad);
    }
};

// The working memory of a thread: the weights, blocks of steps, a step more than go together, and the sums over its
// sequences: the starts, the ends, and but for their weights the transitions. With a direction z also W ∘ z, and what
// the tangent forward sweep finds along it: v̇_n and μ_n of every visit.
template <class S, class Real>
struct Worker {
    const ScoresProblem<S>& problem;
    const Scores<const S>* z;
    const Layout<Real>& layout;
    Weights<Real> weights;
    PackedMatrix<Real> tilted;
    int64_t size;
    bool is_ready = false;
    Array<Real> blocks, tangents, means, start, end;
    Array<Real> plain, rest;  // Σ u aᵀ, and further summands of the Hessian

    // For sequences of at most so many visits.
    Worker(const ScoresProblem<S>& of, const Scores<const S>* along, const Layout<Real>& in, int count, int64_t visits)
        : problem(of),
          z(along),
          layout(in),
          weights(in),
          tilted(in),
          size((in.depth + 1) * in.stride + lanes_of<Real> * in.gap),
          blocks(zeros<Real>(count * size)),
          start(zeros<Real>(in.states)),
          end(zeros<Real>(in.states)),
          plain(zeros<Real>(in.outer_size())) {
        if (!z) return;
        tangents = scratch<Real>(visits * in.stride);
        means = scratch<Real>(visits * in.stride);
        rest = zeros<Real>(in.outer_size());
    }

    Real* block(int k) const { return blocks.get() + k * size; }

    // s of visits n … n + steps − 1, from a of the visits before them or from the tape.
    void read_sums(const Group<S, Real>& group, int64_t n, int64_t steps, const Real* a, Real* s) const {
        if (group.keeps_sums()) return group.read(group.tape(), 1, n, steps, Vec<Real>{}, s);
        if (n == 0) std::fill_n(s, layout.stride, Real(1));
        for (int64_t at = n == 0 ? layout.stride : 0; at < steps * layout.stride; at += layout.stride) {
            multiply<Real>(layout, {{weights, a + at}}, false, s + at);
        }
    }

    // The weights for a group; whether all transitions were below +∞ and not NaN.
    bool prepare(const Group<S, Real>& group, bool has_into, bool has_out_of) {
        if (group.longest < 2 || (is_ready && problem.transition_batch == 0)) return true;
        const int64_t matrix = group.b[0] * problem.transition_batch, states = layout.states;
        const bool good = weights.fill(problem.scores.transitions + matrix);
        weights.pack(has_into, has_out_of);
        for (int64_t i = 0; z && i < states; ++i) {
            const S* along = z->transitions + matrix + i * states;
            const Real* row = &weights.rows[i * layout.padded];
            Real* to = &tilted.rows[i * layout.padded];  // z does not matter unless the weight is positive
            for (int64_t p = 0; p < states; ++p) to[p] = row[p] > 0 ? row[p] * Real(along[p]) : Real(0);
        }
        if (z) tilted.pack(true, true);
        is_ready = true;
        return good;
    }

    // Adds the masses of the first and the last step of each sequence to the starts and the ends.
    void add_ends(const Group<S, Real>& group, const Scores<S>& out) {
        const auto add = [&](const S* from, int64_t b, int64_t batch, S* to, Real* total) {
            for (int64_t i = 0; i < layout.states; ++i) {
                batch ? to[b * batch + i] += from[i] : total[i] += Real(from[i]);
            }
        };
        for (int l = 0; l < group.members && group.length[l] > 0; ++l) {
            const int64_t b = group.b[l], last = group.length[l] - 1;
            add(out.emissions + group.row(group.visits, l, 0), b, problem.start_batch, out.start, start.get());
            add(out.emissions + group.row(group.visits, l, last), b, problem.end_batch, out.end, end.get());
        }
    }

    // transitions += W ∘ (rest + z ∘ plain); without z, W ∘ plain.
    void deliver_transitions(int64_t matrix, const Scores<S>& out) {
        const int64_t states = layout.states;
        for (int64_t i = 0; i < states; ++i) {
            const int64_t to = matrix + i * states;
            for (int64_t p = 0; p < states; ++p) {
                const Real weight = weights.rows[i * layout.padded + p], sum = layout.outer(plain.get(), i, p);
                const Real part = z ? layout.outer(rest.get(), i, p) + Real(z->transitions[to + p]) * sum : sum;
                out.transitions[to + p] += weight > 0 ? S(weight * part) : S(0);
            }
        }
        std::fill_n(plain.get(), layout.outer_size(), Real(0));
        if (z) std::fill_n(rest.get(), layout.outer_size(), Real(0));
    }
    // The sums, to what the batch shares.
    void deliver(const Scores<S>& out) {
        if (!problem.transition_batch) deliver_transitions(0, out);
        for (int64_t i = 0; i < layout.states; ++i) {
            if (!problem.start_batch) out.start[i] += S(start[i]);
            if (!problem.end_batch) out.end[i] += S(end[i]);
        }
    }
};

// --- forward

// after = factors ∘ sums · scale of a row, and the greatest of them. Returns the least, padding aside.
template <class S>
Vec<S> scale_row(const Layout<S>& layout, const S* __restrict factors, const S* __restrict sums, Vec<S> scale,
                 Vec<S> padding, S* __restrict after, Vec<S>& greatest) {
    const int64_t gap = layout.gap, last = (layout.width - 1) * gap;
    Vec<S> top{}, lowest = broadcast(S(1));
    for (int64_t at = 0; at <= last; at += gap) {
        const Vec<S> result = (load<S>(factors + at) * scale) * load<S>(sums + at);
        store<S>(after + at, result);
        top = greater<S>(top, result);
        lowest = lesser<S>(at < last ? result : result + padding, lowest);
    }
    greatest = top;
    return lowest;
}

// The sum of the probabilities of the last states but for a factor, a ∘ ends of a row.
template <class S>
Vec<S> sum_ends(const Layout<S>& layout, const S* __restrict a, const S* __restrict ends) {
    Vec<S> total{};
    for (int64_t v = 0; v < layout.width; ++v) total += load<S>(a + v * layout.gap) * load<S>(ends + v * layout.gap);
    return layout.sum(total);
}

// The forward sweep of a group. A sequence that has ended continues with emissions of 0, which change nothing.
template <class S, class Real>
class ExpForward {
    static constexpr int lanes = lanes_of<Real>, most_rows = Layout<Real>::most_rows;
    using F = Format<Real>;
    using Int = typename F::Int;
    using Bits = typename Shape<Vec<Real>>::Bits;

    const Group<S, Real>& group;
    const Worker<S, Real>& worker;
    S *value, *tape;
    std::uint8_t* underflowed;

    const ScoresProblem<S>& problem = group.problem;
    const Layout<Real>& layout = group.layout;
    const Weights<Real>& weights = worker.weights;
    const int64_t stride = layout.stride, row = layout.row_stride;
    Real *factors = worker.block(0), *a = worker.block(1), *s = worker.block(2), *ends = worker.block(3);
    omega::Sum<Vec<Real>> offset[most_rows];  // v_n = log a_n + offset + n · weights.base + exponent · log 2
    Bits exponent[most_rows] = {};
    Vec<Real> end_top[most_rows];
    Vec<Real> scale[most_rows];  // the power of two that brings the greatest of the last a to 1
    Ints<Real> lost[most_rows] = {}, bad = {};
    bool has_closed_ends = false;
    Vec<Real> padding = layout.low < Real(0) ? broadcast(Real(1)) : Vec<Real>{};

public:
    ExpForward(const Group<S, Real>& of, const Worker<S, Real>& by, S* to_value, S* to_tape, std::uint8_t* to_lost)
        : group(of), worker(by), value(to_value), tape(to_tape), underflowed(to_lost) {}

    // Whether all scores and values of the group were below +∞ and not NaN.
    bool run() {
        begin();
        Pace pace;
        for (int64_t n = 0; n < group.longest; n += layout.depth) {
            pace.spend(layout.depth * layout.stride * group.problem.states);
            const int64_t steps = std::min(layout.depth, group.longest - n);
            group.read(problem.scores.emissions, group.visits, n, steps, layout.low, factors);
            for (int64_t k = 0; k < steps; ++k) {
                weigh(k, n + k == 0 ? a : weights.shift.get());
                step(n + k, k);
            }
            if (tape) {
                group.write(a + stride, n, steps, 0, reinterpret_cast<Real*>(tape));
                if (group.keeps_sums()) group.write(s, n, steps, 1, reinterpret_cast<Real*>(tape));
            }
            if (gives_up(n + steps)) break;
            std::copy_n(a + steps * stride, stride, a);
        }
        return !any(bad);
    }

private:
    // True if every sequence with more than `done` visits has lost paths.
    bool gives_up(int64_t done) {
        const auto is_longer = [&](int l) { return group.length[l] > done; };
        for (int l = 0; l < group.members; ++l) {
            if (is_longer(l) && !lost[layout.row_of(l)][layout.lane_of(l)]) return false;
        }
        for (int l = 0; l < group.members; ++l) {
            if (is_longer(l)) set(l, S(0), true);
        }
        return true;
    }

    // The scores of the start are the shift of the first step.
    void begin() {
        for (int l = 0; l < group.members; ++l) {
            if (group.length[l] == 0) set(l, S(0), false);
        }
        group.read_once(problem.scores.start, problem.start_batch, layout.low, a);
        group.read_once(problem.scores.end, problem.end_batch, layout.low, ends);
        std::fill_n(factors, stride, Real(0));
        for (int r = 0; r < layout.rows; ++r) {
            offset[r].add(exponentiate<Real>(layout, a + r * row, nullptr, bad));
            end_top[r] = exponentiate<Real>(layout, ends + r * row, factors + r * row, bad);
            for (int64_t v = 0; v < layout.width; ++v) {
                const Vec<Real> end = load<Real>(ends + r * row + v * layout.gap);
                has_closed_ends |= any((v + 1 < layout.width ? end : end + padding) < least_dense<Real>);
            }
            scale[r] = broadcast(Real(1));
        }
    }

    void weigh(int64_t k, const Real* shift) {
        for (int r = 0; r < layout.rows; ++r) {
            offset[r].add(exponentiate<Real>(layout, factors + k * stride + r * row, shift + r * row, bad));
        }
    }

    void step(int64_t n, int64_t k) {
        const Real* given = factors + k * stride;
        Real *after = a + (k + 1) * stride, *through = s + k * stride;
        if (n == 0) {
            std::fill_n(through, stride, Real(1));
        } else {
            multiply<Real>(layout, {{weights, a + k * stride}}, false, through);
        }
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t at = r * row;
            Vec<Real> greatest;
            const Vec<Real> lowest =
                scale_row(layout, given + at, through + at, scale[r], padding, after + at, greatest);
            const Ints<Real> ends_here = group.lengths[r] == Ints<Real>{} + Int(n + 1);
            const bool may_matter = !weights.is_dense || (has_closed_ends && any(ends_here));
            if (may_matter && any(lowest < least<Real>)) check(r, given + at, through + at, after + at);
            if (any(ends_here)) finish(n, r, after + at);
            const Bits power = bits<Bits>(layout.greatest(greatest)) >> F::mantissa;
            scale[r] = bits<Vec<Real>>((Int(2 * F::bias) - power) << F::mantissa);
            exponent[r] += power - Int(F::bias);
        }
    }

    // Looks for states that may be reached, but have so little that what leads through them may be lost.
    void check(int r, const Real* given, const Real* through, const Real* after) {
        Ints<Real> low{};
        for (int64_t at = 0; at < layout.width * layout.gap; at += layout.gap) {
            const Ints<Real> reached = weights.is_moderate ? load<Real>(through + at) > Real(0) : ~Ints<Real>{};
            low |= (load<Real>(after + at) < least<Real>) & (load<Real>(given + at) > Real(0)) & reached;
        }
        lost[r] |= layout.across ? low : Ints<Real>{} - any(low);
    }

    // The values of the sequences of a row that end at visit n.
    void finish(int64_t n, int r, const Real* last) {
        const Vec<Real> total = sum_ends<Real>(layout, last, ends + r * row), log = log2_of(total);
        Ints<Real> reached{};
        for (int64_t at = 0; at < layout.width * layout.gap; at += layout.gap) {
            reached |= (load<Real>(last + at) > Real(0)) & (load<Real>(ends + r * row + at) > Real(0));
        }
        if (!layout.across) reached = Ints<Real>{} - any(reached);
        const Ints<Real> is_lost = lost[r] | ((total < least<Real>) & reached);
        for (int l = layout.first_of(r); l < group.members && layout.row_of(l) == r; ++l) {
            if (group.length[l] != n + 1) continue;
            const int lane = layout.lane_of(l);
            const double powers = (double(Int(exponent[r][lane])) + double(log[lane])) * omega::Negentropy<double>::ln2;
            const double tops = double(offset[r].total[lane]) - double(offset[r].lost[lane]) + double(end_top[r][lane]);
            // If the sum of maxima overflows, the sequence is solved again in log space, which adds in double.
            const bool overflows = !std::isfinite(tops);
            const double result = tops + double(n) * double(weights.base) + powers;
            set(l, total[lane] > 0 ? S(result) : -infinity<S>, is_lost[lane] || overflows);
        }
    }

    void set(int l, S found, bool is_lost) {
        if (!is_lost && !(found < infinity<S>)) bad = ~Ints<Real>{};  // the value overflows
        value[group.b[l]] = found;
        underflowed[group.b[l]] = is_lost;
        if (tape) tape[tape_place(problem, group.b[l])] = is_lost ? S(0) : mark<S, Real>;
    }
};

// --- tangent forward

// The mean of a row from s times it, v̇ = z + mean − base where the state has mass, and a ∘ v̇. Returns ⟨a, v̇⟩ / Σ a.
template <class S>
Vec<S> push_row(const Layout<S>& layout, const S* __restrict a, const S* __restrict z, const S* __restrict s,
                Vec<S> base, S* __restrict mean, S* __restrict tangent, S* __restrict a_dot) {
    Vec<S> sum{}, sum_dot{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> mass = load<S>(a + at), through = load<S>(s + at);
        const Vec<S> centre = through > S(0) ? load<S>(mean + at) / through : Vec<S>{};
        const Vec<S> moved = mass > S(0) ? (load<S>(z + at) + centre) - base : Vec<S>{};
        store<S>(mean + at, centre);
        store<S>(tangent + at, moved);
        store<S>(a_dot + at, mass * moved);
        sum += mass;
        sum_dot += mass * moved;
    }
    const Vec<S> total = layout.sum(sum);
    return total > S(0) ? layout.sum(sum_dot) / total : Vec<S>{};
}

// v̇_n and μ_n = (W (a ∘ v̇)_{n−1} + (W ∘ z) a_{n−1}) / s_n of every visit. v̇_n is relative to a separate base, which
// keeps its precision, and μ_n to the base of v̇_{n−1}.
template <class S, class Real>
void sweep_tangent(const Group<S, Real>& group, const Worker<S, Real>& worker) {
    const Layout<Real>& layout = group.layout;
    const int64_t stride = layout.stride;
    Real *a = worker.block(0), *s = worker.block(1), *z = worker.block(2), *a_dot = worker.block(3);
    Vec<Real> base[Layout<Real>::most_rows] = {};
    Pace pace;
    for (int64_t n = 0; n < group.longest; n += layout.depth) {
        pace.spend(layout.depth * layout.stride * group.problem.states);
        const int64_t steps = std::min(layout.depth, group.longest - n), first = n == 0;
        group.read(group.tape(), 0, n - 1 + first, steps + 1 - first, Vec<Real>{}, a + first * stride);
        worker.read_sums(group, n, steps, a, s);
        group.read(worker.z->emissions, group.visits, n, steps, Vec<Real>{}, z);
        for (int64_t k = 0; k < steps; ++k) {
            const int64_t here = k * stride;
            Real *mean = &worker.means[(n + k) * stride], *tangent = &worker.tangents[(n + k) * stride];
            if (n + k == 0) {
                group.read_once(worker.z->start, group.problem.start_batch, Vec<Real>{}, mean);  // s is 1
            } else {
                multiply<Real>(layout, {{worker.weights, a_dot + here}, {worker.tilted, a + here}}, false, mean);
            }
            for (int r = 0; r < layout.rows; ++r) {
                const int64_t row = r * layout.row_stride, at = here + row;
                base[r] = push_row(layout, a + at + stride, z + at, s + at, base[r], mean + row, tangent + row,
                                   a_dot + at + stride);
            }
        }
        std::copy_n(a_dot + steps * stride, stride, a_dot);
    }
}

// --- backward

// u = m / s of a row; returns Σ m.
template <class S>
Vec<S> divide_row(const Layout<S>& layout, const S* __restrict m, const S* __restrict s, S* __restrict u) {
    Vec<S> total{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> x = load<S>(m + at), through = load<S>(s + at);
        total += x;
        store<S>(u + at, through > S(0) ? x / through : Vec<S>{});
    }
    return layout.sum(total);
}

// m = a ∘ Wᵀu · correction of a row, in place of Wᵀu.
template <class S>
void settle_row(const Layout<S>& layout, const S* __restrict a, Vec<S> correction, S* __restrict m) {
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        store<S>(m + at, load<S>(a + at) * load<S>(m + at) * correction);
    }
}

// ⟨m, v̇⟩ / Σ m of a row.
template <class S>
Vec<S> mean_of_row(const Layout<S>& layout, const S* __restrict m, const S* __restrict tangent) {
    Vec<S> sum{}, total{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> mass = load<S>(m + at);
        total += mass;
        sum += mass * load<S>(tangent + at);
    }
    total = layout.sum(total);
    return total != S(0) ? layout.sum(sum) / total : Vec<S>{};
}

// w = u̇ − u ∘ μ = (ṁ − m ∘ μ) / s and ȧ = a ∘ v̇ of a row. μ and v̇ are relative to `centre`. Returns Σ ṁ.
template <class S>
Vec<S> divide_tangent_row(const Layout<S>& layout, const S* __restrict m, const S* __restrict m_dot,
                          const S* __restrict mean, const S* __restrict s, const S* __restrict a,
                          const S* __restrict tangent, Vec<S> centre, S* __restrict w, S* __restrict a_dot) {
    Vec<S> total{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> x_dot = load<S>(m_dot + at), through = load<S>(s + at);
        total += x_dot;
        const Vec<S> moved = load<S>(m + at) * (load<S>(mean + at) - centre);
        store<S>(w + at, through > S(0) ? (x_dot - moved) / through : Vec<S>{});
        store<S>(a_dot + at, load<S>(a + at) * (load<S>(tangent + at) - centre));
    }
    return layout.sum(total);
}

// ṁ of a row from m and, in its place, the derivative of Wᵀu without the derivative of a.
template <class S>
void settle_tangent_row(const Layout<S>& layout, const S* __restrict a, const S* __restrict tangent,
                        const S* __restrict m, Vec<S> correction, Vec<S> base, S* __restrict m_dot) {
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> pushed = load<S>(a + at) * load<S>(m_dot + at) * correction;
        store<S>(m_dot + at, pushed + load<S>(m + at) * (load<S>(tangent + at) - base));
    }
}

// The backward sweep of a group, times the seeds, for the gradient; with a direction, for its derivative along it,
// the product with the Hessian. A sequence that has not begun has no mass. Where place k of a block of s and u belongs
// to visit n, place k of a and m belongs to visit n − 1.
template <class S, class Real>
class ExpBackward {
    using Int = typename Format<Real>::Int;
    const Group<S, Real>& group;
    Worker<S, Real>& worker;

    const ScoresProblem<S>& problem = group.problem;
    const Layout<Real>& layout = group.layout;
    const int64_t stride = layout.stride, row = layout.row_stride;
    Real *a = worker.block(0), *s = worker.block(1), *m = worker.block(2), *u = worker.block(3);
    Real* ends = worker.block(4);
    // With a direction only.
    Real *m_dot = worker.block(5), *w = worker.block(6), *a_dot = worker.block(7), *ends_dot = worker.block(8);
    Vec<Real> seed[Layout<Real>::most_rows] = {}, correction[Layout<Real>::most_rows];
    Vec<Real> part[Layout<Real>::most_rows];  // of the sum of m_n

public:
    ExpBackward(const Group<S, Real>& of, Worker<S, Real>& by, const S* seeds) : group(of), worker(by) {
        for (int l = 0; l < group.members; ++l) layout.set(seed, l, Real(seeds[group.b[l]]));
        Ints<Real> unused{};
        std::fill_n(m, stride, Real(0));
        group.read_once(problem.scores.end, problem.end_batch, layout.low, ends);
        for (int r = 0; r < layout.rows; ++r) exponentiate<Real>(layout, ends + r * row, m, unused);
        if (!worker.z) return;
        std::fill_n(m_dot, stride, Real(0));
        group.read_once(worker.z->end, problem.end_batch, Vec<Real>{}, ends_dot);
    }

    void run(S* emissions) {
        const int64_t longest = group.longest, depth = layout.depth;
        Pace pace;
        for (int64_t n = (longest - 1) / depth * depth; n >= 0 && longest > 0; n -= depth) {
            pace.spend(depth * stride * group.problem.states);
            const int64_t steps = std::min(depth, longest - n), first = n == 0;
            group.read(group.tape(), 0, n - 1 + first, steps + 1 - first, Vec<Real>{}, a + first * stride);
            worker.read_sums(group, n, steps, a, s);
            std::copy_n(m, stride, m + steps * stride);
            if (worker.z) std::copy_n(m_dot, stride, m_dot + steps * stride);
            for (int64_t k = steps - 1; k >= 0; --k) {
                begin(n + k, (k + 1) * stride);
                if (n + k == 0) continue;
                step(k * stride);
                if (worker.z) step_tangent(n + k, k * stride);
            }
            group.write((worker.z ? m_dot : m) + stride, n, steps, group.visits, emissions);
            layout.add_outer(u + first * stride, a + first * stride, steps - first, worker.plain.get());
            if (!worker.z) continue;
            layout.add_outer(u + first * stride, a_dot + first * stride, steps - first, worker.rest.get());
            layout.add_outer(w + first * stride, a + first * stride, steps - first, worker.rest.get());
        }
    }

private:
    // The masses of the last states of the sequences that end at visit n.
    void begin(int64_t n, int64_t here) {
        for (int r = 0; r < layout.rows; ++r) {
            const Ints<Real> on = group.lengths[r] == Ints<Real>{} + Int(n + 1);
            if (!any(on)) continue;
            const int64_t at = here + r * row;
            const Vec<Real> total = sum_ends<Real>(layout, a + at, ends + r * row);
            const Vec<Real> factor = (on & (total > Real(0))) ? 1 / total : Vec<Real>{};
            Vec<Real> centre{};
            for (int64_t v = 0; v < layout.width; ++v) {
                const int64_t k = at + v * layout.gap, end = r * row + v * layout.gap;
                const Vec<Real> q = load<Real>(a + k) * load<Real>(ends + end) * factor;
                store<Real>(m + k, on ? q * seed[r] : load<Real>(m + k));
                if (!worker.z) continue;
                const Vec<Real> moved = load<Real>(&worker.tangents[n * stride + end]) + load<Real>(ends_dot + end);
                centre += q > Real(0) ? q * moved : Vec<Real>{};
            }
            if (worker.z) begin_tangent(n, at, r, on, layout.sum(centre));
        }
    }
    void begin_tangent(int64_t n, int64_t at, int r, Ints<Real> on, Vec<Real> centre) {
        for (int64_t v = 0; v < layout.width; ++v) {
            const int64_t k = at + v * layout.gap, end = r * row + v * layout.gap;
            const Vec<Real> moved = load<Real>(&worker.tangents[n * stride + end]) + load<Real>(ends_dot + end);
            const Vec<Real> mass = load<Real>(m + k), found = mass != Real(0) ? mass * (moved - centre) : Vec<Real>{};
            store<Real>(m_dot + k, on ? found : load<Real>(m_dot + k));
        }
    }

    // From m_n to m_{n−1}. Their sums, which but for rounding are the seed and 0 (ṁ_n), are set right on the way.
    void step(int64_t at) {
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row;
            const Vec<Real> total = divide_row(layout, m + here + stride, s + here, u + here);
            part[r] = total != Real(0) ? 1 / total : Vec<Real>{};
            correction[r] = seed[r] * part[r];
        }
        multiply<Real>(layout, {{worker.weights, u + at}}, true, m + at);
        for (int r = 0; r < layout.rows; ++r) settle_row(layout, a + at + r * row, correction[r], m + at + r * row);
    }

    // v̇ and μ are relative to the mean of v̇ under m: their difference has an error in proportion to their size.
    void step_tangent(int64_t n, int64_t at) {
        const Real *mean = &worker.means[n * stride], *tangent = &worker.tangents[(n - 1) * stride];
        Vec<Real> base[Layout<Real>::most_rows];
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row, next = here + stride;
            const Vec<Real> centre = mean_of_row(layout, m + here, tangent + r * row);
            base[r] = centre + part[r] * divide_tangent_row(layout, m + next, m_dot + next, mean + r * row, s + here,
                                                            a + here, tangent + r * row, centre, w + here, a_dot + here);
        }
        multiply<Real>(layout, {{worker.weights, w + at}, {worker.tilted, u + at}}, true, m_dot + at);
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row;
            settle_tangent_row(layout, a + here, tangent + r * row, m + here, correction[r], base[r], m_dot + here);
        }
    }
};

// --- all sequences

// The longest first.
void sort_by_length(std::vector<int64_t>& sequences, const int64_t* lengths) {
    const auto is_before = [lengths](int64_t a, int64_t b) {
        return lengths[a] > lengths[b] || (lengths[a] == lengths[b] && a < b);
    };
    std::sort(sequences.begin(), sequences.end(), is_before);
}

// Groups of sequences in one layout, and the working memory of each thread.
template <class S, class Real>
struct Groups {
    const ScoresProblem<S>& problem;
    const Layout<Real> layout;
    const int64_t *order, count, size;  // the sequences, and the number of groups
    std::vector<Worker<S, Real>> workers;

    Groups(const ScoresProblem<S>& of, const Scores<const S>* z, int blocks, const Layout<Real>& in,
           const int64_t* sequences, int64_t number)
        : problem(of),
          layout(in),
          order(sequences),
          count(number),
          size((number + in.sequences - 1) / in.sequences) {
        for (int64_t k = 0; k < std::min<int64_t>(std::max(problem.threads, 1), size); ++k) {
            workers.emplace_back(problem, z, layout, blocks, problem.lengths[order[0]]);
        }
    }
    Groups(const Groups&) = delete;  // workers refer to its layout

    Group<S, Real> operator[](int64_t n) const {
        const int64_t first = n * layout.sequences;
        return {problem, layout, order + first, std::min<int64_t>(layout.sequences, count - first)};
    }
};

// Sequences, the longest first, in groups that are dealt out to the threads in turn. The sequences that do not fill a
// group have a layout for their number.
template <class S, class Real>
struct GroupPlan {
    const ScoresProblem<S>& problem;
    const std::vector<int64_t> order;
    const int64_t count = int64_t(order.size()), rest = count % choose(count).sequences;
    Groups<S, Real> full, last;

    // The sequences for which is_chosen(b); each worker has so many blocks of steps.
    template <class Choice>
    GroupPlan(const ScoresProblem<S>& of, Choice is_chosen, const Scores<const S>* z, int blocks)
        : problem(of),
          order(longest_first(is_chosen)),
          full(of, z, blocks, choose(count), order.data(), count - rest),
          last(of, z, blocks, choose(rest), order.data() + count - rest, rest) {}

    // body(group, worker) for each group.
    template <class Body>
    void for_groups(Body body) {
        const int64_t all = full.size + last.size, threads = std::min<int64_t>(std::max(problem.threads, 1), all);
        parallel_for(all, int(threads), [&](int64_t n, int) {
            Groups<S, Real>& groups = n < full.size ? full : last;
            const int64_t k = n < full.size ? n : n - full.size;
            body(groups[k], groups.workers[std::size_t(k % threads)]);
        });
    }
    template <class Body>
    void for_workers(Body body) {
        for (Worker<S, Real>& worker : full.workers) body(worker);
        for (Worker<S, Real>& worker : last.workers) body(worker);
    }

private:
    template <class Choice>
    std::vector<int64_t> longest_first(Choice is_chosen) const {
        std::vector<int64_t> all;
        for (int64_t b = 0; b < problem.batch; ++b) {
            if (is_chosen(b)) all.push_back(b);
        }
        sort_by_length(all, problem.lengths);
        return all;
    }

    // Sequences are in the lanes up to so many vectors of states: sums over them are slower than products.
    Layout<Real> choose(int64_t number) const {
        constexpr int lanes = lanes_of<Real>;
        const int64_t threads = std::max(problem.threads, 1), states = problem.states;
        const int64_t vectors = problem.tape ? 3 : 5, padded = (states + lanes - 1) / lanes * lanes;
        if (problem.transition_batch) return {states, false, 1};
        if (number * padded >= lanes * states && states < vectors * lanes) {
            return {states, true, number > lanes * threads ? 2 : 1};
        }
        return {states, false, number > 2 * threads ? 4 : 1};
    }
};

// The forward sweep, in Real, of the sequences for which is_chosen(b).
template <class Real, class S, class Choice>
bool sweep_forward(const ScoresProblem<S>& problem, Choice is_chosen, S* value, S* tape, std::uint8_t* underflowed) {
    GroupPlan<S, Real> plan(problem, is_chosen, nullptr, 4);
    std::atomic<bool> good{true};
    plan.for_groups([&](const Group<S, Real>& group, Worker<S, Real>& worker) {
        const bool is_good = worker.prepare(group, true, false);
        if (!ExpForward<S, Real>(group, worker, value, tape, underflowed).run() || !is_good) good = false;
    });
    return good;
}

// If numbers of a sequence underflow in float, the sequence is solved again in double.
template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape, std::uint8_t* underflowed) {
    const auto all = [](int64_t) { return true; };
    const bool good = sweep_forward<S>(problem, all, value, tape, underflowed);
    if (sizeof(S) == sizeof(double) || problem.states < least_states_in_double) return good;
    const auto lost = [&](int64_t b) { return underflowed[b] != 0; };
    return sweep_forward<double>(problem, lost, value, tape, underflowed) && good;
}

// The gradient, or with z the product of the Hessian with it, of the sequences whose tape has a in Real.
template <class Real, class S>
void sweep_back(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>* z, const Scores<S>& out) {
    const auto is_chosen = [&](int64_t b) { return tape_mark(problem, b) == mark<S, Real>; };
    GroupPlan<S, Real> plan(problem, is_chosen, z, z ? 9 : 5);
    plan.for_groups([&](const Group<S, Real>& group, Worker<S, Real>& worker) {
        worker.prepare(group, z || !group.keeps_sums(), true);
        for (int l = 0; l < group.members; ++l) {
            S* sequence = out.emissions + group.b[l] * problem.steps * problem.states;
            clear_masked(problem, group.b[l], sequence, problem.states);
        }
        if (z) sweep_tangent(group, worker);
        ExpBackward<S, Real>(group, worker, seed).run(out.emissions);
        worker.add_ends(group, out);
        if (problem.transition_batch) worker.deliver_transitions(group.b[0] * problem.transition_batch, out);
    });
    plan.for_workers([&](Worker<S, Real>& worker) { worker.deliver(out); });
}
// The sequences of each precision.
template <class S>
void sweep_both_back(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>* z, const Scores<S>& out) {
    sweep_back<S>(problem, seed, z, out);
    if (sizeof(S) < sizeof(double)) sweep_back<double>(problem, seed, z, out);
}

}  // namespace
}  // namespace in_exp_space

template <class S>
ProductKernels<S> product_kernels() {
    using in_exp_space::sweep_both_back;
    return {in_exp_space::forward<S>,
            [](const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
                sweep_both_back<S>(problem, seed, nullptr, gradient);
            },
            [](const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
                sweep_both_back<S>(problem, seed, &z, product);
            }};
}
template ProductKernels<float> product_kernels<float>();
template ProductKernels<double> product_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
