// The sweeps of a chain (Algorithms 3 and 4 of the paper, mended). A row of potentials, the transitions into one state,
// lies side by side in memory and in the lanes; threads take different sequences. Values are double, and a row is
// computed relative to the greatest value of the step before, in the precision of the potentials.
#include "chain.h"

#include <cstddef>
#include <type_traits>

#include "parallel.h"

#ifndef BELLMAX_ARCH
#error "compile with -DBELLMAX_ARCH=baseline or avx2"
#endif

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;

constexpr int lanes = 8;

template <class T>
struct Kind {
    using type = T;
};

// One sequence: where its numbers lie, and a row's worth of room, padded to whole lanes with −∞ or 0.
template <class S, class Omega>
struct Sequence {
    using Real = typename Omega::Real;

    Omega omega;
    int64_t states, padded, steps, length;
    const S* theta;
    const double *value, *threshold;  // by step and state: values before and after each step, thresholds after it
    std::unique_ptr<Real[]> before;   // values before a step, relative to base
    std::unique_ptr<Real[]> r, q, s;  // of the row that was loaded last; r is relative to its greatest entry
    double base = 0;
    Real tau = 0;

    Sequence(const ChainProblem<S>& problem, int64_t b, const double* tape)
        : omega(problem.omega),
          states(problem.states),
          padded((problem.states + lanes - 1) / lanes * lanes),
          steps(problem.steps),
          length(problem.lengths[b]),
          theta(problem.theta + b * steps * states * states),
          value(tape + b * 2 * (steps + 1) * states),
          threshold(value + (steps + 1) * states),
          before(scratch<Real>(padded)),
          r(scratch<Real>(padded)),
          q(zeros<Real>(padded)),
          s(zeros<Real>(padded)) {
        for (int64_t p = 0; p < padded; ++p) before[p] = r[p] = -infinity<Real>;
    }

    const S* row(int64_t t, int64_t i) const { return theta + (t * states + i) * states; }

    // At the first step only state 0 comes before.
    int64_t width(int64_t t) const { return t == 0 ? 1 : states; }

    void enter(int64_t t) {
        const double* values = value + t * states;
        double top = -infinity<double>;
        for (int64_t p = 0; p < states; ++p) top = values[p] > top ? values[p] : top;
        base = top == -infinity<double> ? 0 : top;
        for (int64_t p = 0; p < states; ++p) before[p] = Real(values[p] - base);
    }

    // Scores θ + v of the edges into state i at step t, relative to base, into r; the greatest of them.
    Real load(int64_t t, int64_t i) {
        const S* weights = row(t, i);
        const Real* from = before.get();
        Real *to = r.get(), top = -infinity<Real>;
        const int64_t n = width(t);
#pragma omp simd reduction(max : top)
        for (int64_t p = 0; p < n; ++p) {
            to[p] = Real(weights[p]) + from[p];
            top = to[p] > top ? to[p] : top;
        }
        for (int64_t p = n; p < states; ++p) to[p] = -infinity<Real>;
        return top;
    }

    // The same for the edges into the end, whose potentials are 0.
    Real load_end() {
        enter(length);
        Real top = -infinity<Real>;
        for (int64_t p = 0; p < states; ++p) {
            r[p] = before[p];
            top = r[p] > top ? r[p] : top;
        }
        return top;
    }

    // Makes r relative to its greatest entry.
    void recentre(Real top) {
        const Real shift = top == -infinity<Real> ? Real(0) : top;
        Real* to = r.get();
#pragma omp simd
        for (int64_t p = 0; p < padded; ++p) to[p] -= shift;
    }

    // The smoothed max of the row that was loaded, relative to base, and its threshold.
    Real solve(Real top) {
        if (top == -infinity<Real>) {
            tau = Omega::by_slot ? Real(-1) : Real(0);
            return top;
        }
        if constexpr (Omega::by_slot) {
            int64_t p = 0;
            while (!(r[p] >= top)) ++p;
            tau = Real(p);
            return top;
        } else {
            recentre(top);
            Real taus[lanes], values[lanes];
            omega.template solve<lanes, true>(r.get(), padded / lanes, taus, values);
            tau = taus[0];
            return top + values[0];
        }
    }

    // Makes r of the row that was loaded what the functions of Ω expect.
    void relate(Real top) {
        if constexpr (Omega::by_slot) {
            for (int64_t p = 0; p < padded; ++p) r[p] = Real(p) == tau ? Real(0) : -infinity<Real>;
        } else {
            recentre(top);
        }
    }

    // q and s of the row that was related. q is made to sum to 1: over a long path its rounding would add up.
    void weigh() {
        const Omega local = omega;
        const Real at = tau, *from = r.get();
        Real *to_q = q.get(), *to_s = s.get(), sum[lanes] = {};
        for (int64_t p = 0; p < padded; p += lanes) {
#pragma omp simd
            for (int l = 0; l < lanes; ++l) {
                Real edge_q, edge_s;
                local.weigh(from[p + l], at, edge_q, edge_s);
                sum[l] += to_q[p + l] = edge_q;
                to_s[p + l] = edge_s;
            }
        }
        share<lanes>(sum);
        const Real scale = sum[0] > 0 ? 1 / sum[0] : Real(1);
#pragma omp simd
        for (int64_t p = 0; p < padded; ++p) to_q[p] *= scale;
    }

    void relate_row(int64_t t, int64_t i) {
        tau = Real(threshold[(t + 1) * states + i]);
        relate(load(t, i));
    }

    void weigh_row(int64_t t, int64_t i) {
        relate_row(t, i);
        weigh();
    }

    // The edges into the end, related and weighed; the value of the program.
    double weigh_end() {
        const Real value_there = solve(load_end());
        relate(load_end());
        weigh();
        return value_there == -infinity<Real> ? -infinity<double> : base + double(value_there);
    }
};

// Runs body(sequence number, Ω) over the threads.
template <class S, class Body>
void for_sequences(const ChainProblem<S>& problem, Body body) {
    with_omega<S>(problem.omega, [&](auto omega) {
        using Omega = decltype(omega);
        parallel_for(problem.batch, problem.threads, [&](int64_t b) { body(b, Kind<Omega>()); });
    });
}

template <class S>
void clear(S* from, S* to) {
    for (; from < to; ++from) *from = 0;
}

template <class S>
bool forward(const ChainProblem<S>& problem, S* value, double* tape) {
    bool good = true;
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        Sequence<S, Omega> sequence(problem, b, tape);
        const int64_t states = problem.states, size = (problem.steps + 1) * states;
        double* v = tape + b * 2 * size;
        for (int64_t p = 0; p < states; ++p) v[p] = p == 0 ? 0 : -infinity<double>;
        bool below = true;
        for (int64_t t = 0; t < sequence.length; ++t) {
            sequence.enter(t);
            for (int64_t i = 0; i < states; ++i) {
                const auto top = sequence.load(t, i);
                const S* weights = sequence.row(t, i);
                const int64_t n = sequence.width(t);
                int above = 0;
#pragma omp simd reduction(| : above)
                for (int64_t p = 0; p < n; ++p) above |= !(weights[p] < infinity<S>);
                below &= !above;
                const int64_t at = (t + 1) * states + i;
                v[at] = sequence.base + double(sequence.solve(top));
                v[size + at] = double(sequence.tau);
            }
        }
        value[b] = sequence.length == 0 ? S(0) : S(sequence.weigh_end());
        if (!below) {
#pragma omp atomic write
            good = false;
        }
    });
    return good;
}

template <class S>
void backward(const ChainProblem<S>& problem, S* path) {
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        Sequence<S, Omega> sequence(problem, b, problem.tape);
        const int64_t states = problem.states, square = states * states;
        S* out = path + b * problem.steps * square;
        clear(out + sequence.length * square, out + problem.steps * square);
        if (sequence.length == 0) return;
        sequence.weigh_end();
        using Real = typename Omega::Real;
        const auto mass = zeros<Real>(states), next = zeros<Real>(states);
        for (int64_t i = 0; i < states; ++i) mass[i] = sequence.q[i];
        for (int64_t t = sequence.length - 1; t >= 0; --t) {
            sequence.enter(t);
            double total = 0;  // 1 but for rounding, or 0
            for (int64_t i = 0; i < states; ++i) total += double(mass[i]);
            const Real scale = total > 0 ? Real(1 / total) : Real(0);
            clear(&next[0], &next[0] + states);
            for (int64_t i = 0; i < states; ++i) {
                S* e = out + (t * states + i) * states;
                if (mass[i] == 0) {
                    clear(e, e + states);
                    continue;
                }
                sequence.weigh_row(t, i);
                const Real held = mass[i] * scale, *q = sequence.q.get();
                Real* to = next.get();
#pragma omp simd
                for (int64_t p = 0; p < states; ++p) {
                    const Real part = q[p] * held;
                    e[p] = S(part);
                    to[p] += part;
                }
            }
            for (int64_t p = 0; p < states; ++p) mass[p] = next[p];
        }
    });
}

// The tangent forward sweep: v̇ before each step, and for J y = s∘(y − mean) the mean ⟨s, y⟩/Σs of each row.
template <class S, class Omega>
struct Tangent {
    using Real = typename Omega::Real;

    Sequence<S, Omega>& sequence;
    const S* z;
    std::unique_ptr<double[]> value, mean;
    std::unique_ptr<Real[]> before, y;  // v̇ before a step and y = z + v̇ along a row, relative to base
    double base = 0;
    double end_mean = 0;

    Tangent(Sequence<S, Omega>& of, const S* direction)
        : sequence(of),
          z(direction),
          value(zeros<double>((of.length + 1) * of.states)),
          mean(zeros<double>((of.length + 1) * of.states)),
          before(zeros<Real>(of.padded)),
          y(zeros<Real>(of.padded)) {
        const int64_t states = sequence.states;
        for (int64_t t = 0; t < sequence.length; ++t) {
            enter(t);
            for (int64_t i = 0; i < states; ++i) {
                sequence.weigh_row(t, i);
                load(t, i);
                average(value[(t + 1) * states + i], mean[(t + 1) * states + i]);
            }
        }
        enter(sequence.length);
        sequence.weigh_end();
        for (int64_t p = 0; p < states; ++p) y[p] = before[p];
        double end_value;
        average(end_value, end_mean);
    }

    void enter(int64_t t) {
        sequence.enter(t);
        const double* values = &value[t * sequence.states];
        base = values[0];
        for (int64_t p = 0; p < sequence.states; ++p) before[p] = Real(values[p] - base);
    }

    void load(int64_t t, int64_t i) {
        const S* direction = z + (t * sequence.states + i) * sequence.states;
        const Real* from = before.get();
        Real* to = y.get();
        const int64_t n = sequence.width(t);
#pragma omp simd
        for (int64_t p = 0; p < n; ++p) to[p] = Real(direction[p]) + from[p];
        for (int64_t p = n; p < sequence.states; ++p) to[p] = 0;
    }

    // ⟨q, y⟩ and ⟨s, y⟩/Σs of the row that was weighed and loaded, from zero again.
    void average(double& along_q, double& along_s) const {
        const Real *q = sequence.q.get(), *s = sequence.s.get(), *to = y.get();
        Real sum_qy = 0, sum_sy = 0, sum_s = 0;
#pragma omp simd reduction(+ : sum_qy, sum_sy, sum_s)
        for (int64_t p = 0; p < sequence.padded; ++p) {
            sum_qy += q[p] > 0 ? q[p] * to[p] : Real(0);
            sum_sy += s[p] > 0 ? s[p] * to[p] : Real(0);
            sum_s += s[p];
        }
        along_q = base + double(sum_qy);
        along_s = base + (sum_s > 0 ? double(sum_sy / sum_s) : 0.0);
    }

    Real mean_of(int64_t t, int64_t i) const { return Real(mean[(t + 1) * sequence.states + i] - base); }
};

template <class S>
void hessian(const ChainProblem<S>& problem, const S* z, S* product) {
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        using Real = typename Omega::Real;
        Sequence<S, Omega> sequence(problem, b, problem.tape);
        const int64_t states = problem.states, square = states * states, first = b * problem.steps * square;
        S* out = product + first;
        clear(out + sequence.length * square, out + problem.steps * square);
        if (sequence.length == 0) return;
        Tangent<S, Omega> tangent(sequence, z + first);
        const auto mass = zeros<Real>(states), mass_dot = zeros<Real>(states);
        const auto next = zeros<Real>(states), next_dot = zeros<Real>(states);
        const Real end_mean = Real(tangent.end_mean - tangent.base);
        for (int64_t i = 0; i < states; ++i) {
            mass[i] = sequence.q[i];
            mass_dot[i] = sequence.s[i] > 0 ? sequence.s[i] * (tangent.y[i] - end_mean) : Real(0);
        }
        for (int64_t t = sequence.length - 1; t >= 0; --t) {
            tangent.enter(t);
            double total = 0;
            for (int64_t i = 0; i < states; ++i) total += double(mass[i]);
            const Real scale = total > 0 ? Real(1 / total) : Real(0);
            clear(&next[0], &next[0] + states);
            clear(&next_dot[0], &next_dot[0] + states);
            for (int64_t i = 0; i < states; ++i) {
                S* e_dot = out + (t * states + i) * states;
                if (mass[i] == 0 && mass_dot[i] == 0) {
                    clear(e_dot, e_dot + states);
                    continue;
                }
                sequence.weigh_row(t, i);
                tangent.load(t, i);
                const Real held = mass[i] * scale, held_dot = mass_dot[i], mean = tangent.mean_of(t, i);
                const Real *q = sequence.q.get(), *s = sequence.s.get(), *y = tangent.y.get();
                Real *to = next.get(), *to_dot = next_dot.get();
                const bool visited = held > 0;
#pragma omp simd
                for (int64_t p = 0; p < states; ++p) {
                    const Real source = visited && s[p] > 0 ? s[p] * (y[p] - mean) * held : Real(0);
                    const Real part = source + q[p] * held_dot;
                    e_dot[p] = S(part);
                    to[p] += q[p] * held;
                    to_dot[p] += part;
                }
            }
            for (int64_t p = 0; p < states; ++p) mass[p] = next[p], mass_dot[p] = next_dot[p];
        }
    });
}

// What belongs to the edge from a state to the end is counted with the edges into that state at the last step.
template <class S>
void log_transitions(const ChainProblem<S>& problem, S* log_q) {
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        using Real = typename Omega::Real;
        Sequence<S, Omega> sequence(problem, b, problem.tape);
        const int64_t states = problem.states, square = states * states;
        S* out = log_q + b * problem.steps * square;
        clear(out + sequence.length * square, out + problem.steps * square);
        if (sequence.length == 0) return;
        const Omega omega = sequence.omega;
        const auto into_end = zeros<Real>(states);
        sequence.weigh_end();
        for (int64_t i = 0; i < states; ++i) into_end[i] = omega.log_q(sequence.r[i], sequence.tau);
        for (int64_t t = 0; t < sequence.length; ++t) {
            sequence.enter(t);
            for (int64_t i = 0; i < states; ++i) {
                sequence.relate_row(t, i);
                const Real *r = sequence.r.get(), tau = sequence.tau;
                S* to = out + (t * states + i) * states;
                const Real last = t + 1 == sequence.length ? into_end[i] : Real(0);
#pragma omp simd
                for (int64_t p = 0; p < states; ++p) to[p] = S(omega.log_q(r[p], tau) + last);
            }
        }
    });
}

template <class S>
void log_transitions_jvp(const ChainProblem<S>& problem, const S* z, S* product) {
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        using Real = typename Omega::Real;
        Sequence<S, Omega> sequence(problem, b, problem.tape);
        const int64_t states = problem.states, square = states * states, first = b * problem.steps * square;
        S* out = product + first;
        clear(out + sequence.length * square, out + problem.steps * square);
        if (sequence.length == 0) return;
        Tangent<S, Omega> tangent(sequence, z + first);
        const auto into_end = zeros<Real>(states);
        for (int64_t i = 0; i < states; ++i) {
            const Real slope = sequence.omega.log_slope(sequence.r[i], sequence.tau);
            into_end[i] = slope > 0 ? slope * (tangent.y[i] - Real(tangent.end_mean - tangent.base)) : Real(0);
        }
        for (int64_t t = 0; t < sequence.length; ++t) {
            tangent.enter(t);
            for (int64_t i = 0; i < states; ++i) {
                sequence.relate_row(t, i);
                tangent.load(t, i);
                const Real mean = tangent.mean_of(t, i), last = t + 1 == sequence.length ? into_end[i] : Real(0);
                S* to = out + (t * states + i) * states;
                for (int64_t p = 0; p < states; ++p) {
                    const Real slope = sequence.omega.log_slope(sequence.r[p], sequence.tau);
                    to[p] = S((slope > 0 ? slope * (tangent.y[p] - mean) : Real(0)) + last);
                }
            }
        }
    });
}

// a = c/q^(α−1) − s Σ(c/q^(α−1))/Σs along the support: the transposed derivative of log q, of one row.
template <class S, class Omega>
void pull_back(const Sequence<S, Omega>& sequence, typename Omega::Real* c) {
    using Real = typename Omega::Real;
    Real sum_c = 0, sum_s = 0;
    for (int64_t p = 0; p < sequence.states; ++p) {
        const Real slope = sequence.omega.log_slope(sequence.r[p], sequence.tau);
        c[p] = slope > 0 ? slope * c[p] : Real(0);
        sum_c += c[p];
        sum_s += sequence.s[p];
    }
    const Real mean = sum_s > 0 ? sum_c / sum_s : Real(0);
    for (int64_t p = 0; p < sequence.states; ++p) c[p] -= sequence.s[p] * mean;
}

template <class S>
void log_transitions_vjp(const ChainProblem<S>& problem, const S* cotangent, S* product) {
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        using Real = typename Omega::Real;
        Sequence<S, Omega> sequence(problem, b, problem.tape);
        const int64_t states = problem.states, square = states * states, first = b * problem.steps * square;
        S* out = product + first;
        clear(out + sequence.length * square, out + problem.steps * square);
        if (sequence.length == 0) return;
        const auto mass = zeros<Real>(states), next = zeros<Real>(states), part = zeros<Real>(states);
        const S* last = cotangent + first + (sequence.length - 1) * square;
        const int64_t last_width = sequence.width(sequence.length - 1);
        for (int64_t i = 0; i < states; ++i) {
            for (int64_t p = 0; p < last_width; ++p) mass[i] += Real(last[i * states + p]);
        }
        sequence.weigh_end();
        pull_back(sequence, mass.get());
        for (int64_t t = sequence.length - 1; t >= 0; --t) {
            sequence.enter(t);
            clear(&next[0], &next[0] + states);
            for (int64_t i = 0; i < states; ++i) {
                const S* given = cotangent + first + (t * states + i) * states;
                S* to = out + (t * states + i) * states;
                for (int64_t p = 0; p < states; ++p) part[p] = p < sequence.width(t) ? Real(given[p]) : Real(0);
                sequence.weigh_row(t, i);
                pull_back(sequence, part.get());
                for (int64_t p = 0; p < states; ++p) {
                    part[p] += sequence.q[p] * mass[i];
                    next[p] += part[p];
                    to[p] = S(part[p]);
                }
            }
            for (int64_t p = 0; p < states; ++p) mass[p] = next[p];
        }
    });
}

// The first entry at which the running sum of q exceeds its share of the total.
template <class S>
int64_t draw(const S* q, int64_t states, double uniform) {
    double total = 0, sum = 0;
    for (int64_t p = 0; p < states; ++p) total += double(q[p]);
    int64_t chosen = 0;
    for (int64_t p = 0; p < states; ++p) {
        if (q[p] > 0) chosen = p;
        sum += double(q[p]);
        if (sum > uniform * total) break;
    }
    return chosen;
}

template <class S>
void sample(const ChainProblem<S>& problem, int64_t draws, const double* uniforms, int64_t* sequences) {
    for_sequences(problem, [&](int64_t b, auto kind) {
        using Omega = typename decltype(kind)::type;
        Sequence<S, Omega> sequence(problem, b, problem.tape);
        const int64_t length = sequence.length;
        for (int64_t n = b * draws; n < (b + 1) * draws; ++n) {
            int64_t* y = sequences + n * problem.steps;
            const double* uniform = uniforms + n * problem.steps;
            for (int64_t t = 0; t < problem.steps; ++t) y[t] = -1;
            if (length == 0 || sequence.weigh_end() == -infinity<double>) continue;
            y[length - 1] = draw(sequence.q.get(), problem.states, uniform[length - 1]);
            for (int64_t t = length - 1; t > 0; --t) {
                sequence.enter(t);
                sequence.weigh_row(t, y[t]);
                y[t - 1] = draw(sequence.q.get(), problem.states, uniform[t - 1]);
            }
        }
    });
}

// Keeps the k greatest scores in descending order, the earlier first among equals, with what belongs to each.
void insert(double score, int64_t origin, double* best, int64_t* origins, int64_t k) {
    int64_t place = k - 1;
    for (; place > 0 && score > best[place - 1]; --place) {
        best[place] = best[place - 1];
        origins[place] = origins[place - 1];
    }
    best[place] = score;
    origins[place] = origin;
}

template <class S>
void topk(const ChainProblem<S>& problem, int64_t k, S* scores, int64_t* sequences) {
    const int64_t states = problem.states, row = states * k;
    parallel_for(problem.batch, problem.threads, [&](int64_t b) {
        const int64_t length = problem.lengths[b];
        const S* theta = problem.theta + b * problem.steps * states * states;
        // The k best ways into each state: scores of this step and the one before, and where each came from, state · k + rank.
        const auto now = scratch<double>(row), before = scratch<double>(row), end = scratch<double>(k);
        const auto origin = scratch<int64_t>((length + 1) * row), end_origin = zeros<int64_t>(k);
        for (int64_t n = 0; n < row; ++n) now[n] = n == 0 ? 0 : -infinity<double>;
        for (int64_t t = 0; t < length; ++t) {
            for (int64_t n = 0; n < row; ++n) before[n] = now[n], now[n] = -infinity<double>;
            for (int64_t i = 0; i < states; ++i) {
                const S* weights = theta + (t * states + i) * states;
                double* best = &now[i * k];
                for (int64_t p = 0; p < (t == 0 ? 1 : states); ++p) {
                    for (int64_t rank = 0; rank < k; ++rank) {
                        const double score = double(weights[p]) + before[p * k + rank];
                        if (!(score > best[k - 1])) break;
                        insert(score, p * k + rank, best, &origin[t * row + i * k], k);
                    }
                }
            }
        }
        for (int64_t n = 0; n < k; ++n) end[n] = -infinity<double>;
        for (int64_t n = 0; n < row; ++n) {
            if (now[n] > end[k - 1]) insert(now[n], n, &end[0], &end_origin[0], k);
        }
        for (int64_t n = 0; n < k; ++n) {
            int64_t* y = sequences + (b * k + n) * problem.steps;
            scores[b * k + n] = S(end[n]);
            for (int64_t t = 0; t < problem.steps; ++t) y[t] = -1;
            if (end[n] == -infinity<double>) continue;
            int64_t place = end_origin[n];
            for (int64_t t = length - 1; t >= 0; --t) {
                y[t] = place / k;
                place = origin[t * row + place];
            }
        }
    });
}

}  // namespace

template <class S>
ChainKernels<S> chain_kernels() {
    return {forward<S>,
            backward<S>,
            hessian<S>,
            log_transitions<S>,
            log_transitions_jvp<S>,
            log_transitions_vjp<S>,
            sample<S>,
            topk<S>};
}

template ChainKernels<float> chain_kernels<float>();
template ChainKernels<double> chain_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
