// The sweeps of one lattice of a batch, for any table and any Ω, with values in double.
//
// For every wave and state, the candidates become rows of numbers, one for each, along the wave; what follows knows
// only these rows.
#pragma once

#include "gradients.h"
#include "rules.h"
#include "waves.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// The rows of one thread.
struct Rows {
    int64_t width;  // of a row: places of a wave, whole vectors
    Array<double> x, y, mean, threshold;
    Array<double> masses, mass_dots;  // of the last waves, by wave, state and place
    Array<double> dots;               // tangents of all nodes
    Array<double> end_x, end_y;

    Rows(const LatticeProblem& p, const Table& table, bool with_masses, bool with_dots) {
        constexpr int64_t W = lanes_of<double>;
        width = (std::max(p.rows, p.columns) + W - 1) / W * W;
        x = scratch<double>(Table::most * width);
        threshold = scratch<double>(width);
        mean = scratch<double>(width);
        const int64_t last = p.ends.place == Place::anywhere ? p.rows * p.columns : p.rows + p.columns;
        end_x = scratch<double>(p.states * last + W);
        if (with_masses) masses = zeros<double>((table.history + 1) * p.states * width);
        if (!with_dots) return;
        y = scratch<double>(Table::most * width);
        mass_dots = zeros<double>((table.history + 1) * p.states * width);
        dots = scratch<double>(p.rows * p.columns * p.states);
        end_y = scratch<double>(p.states * last + W);
    }
};

class TableSweeps {
    static constexpr int W = lanes_of<double>;

    const LatticeProblem& p;
    const Table& table;
    const Rules& rules;
    const int64_t b;
    const Waves waves;
    double* const values;  // of all nodes
    double* const thresholds;
    Rows& own;
    bool bad = false;

    // The scores, by what they are of.
    int score_of_state(int k) const { return k; }
    int score_of(int k, const Candidate& c) const { return c.move < 0 ? p.states + p.moves + k : p.states + c.move; }
    int score_of_end(int k) const { return 2 * p.states + p.moves + k; }

    int64_t offset(int64_t w, int k) const { return waves.offset(w, k, p.states); }
    // Where masses of a wave and state are, by place.
    int64_t ring(int64_t w, int k) const { return ((w % (table.history + 1)) * p.states + k) * own.width; }

    // to[n] += scale · the score at the n-th place of a span.
    void add(const Scores& scores, int64_t w, Span span, double scale, double* to) {
        if (!scores.numbers || span.count() == 0) return;
        const auto line = waves.line(scores, b, w);
        const int64_t first = line.first + span.low * line.step;
        const bool sound = p.is_double ? add_from<double>(line, first, span.count(), scale, to)
                                       : add_from<float>(line, first, span.count(), scale, to);
        bad = bad || !sound;
    }
    template <class S>
    static bool add_from(const Waves::Line& line, int64_t first, int64_t count, double scale, double* __restrict to) {
        const S* __restrict from = static_cast<const S*>(line.numbers) + first;
        int64_t unsound = 0;
        const auto add_one = [&](int64_t n, double score) {
            unsound += !(score < infinity<double>);
            to[n] += scale * score;
        };
        if (line.step == 1) {
            for (int64_t n = 0; n < count; ++n) add_one(n, double(from[n]));
        } else {
            for (int64_t n = 0; n < count; ++n) add_one(n, double(from[n * line.step]));
        }
        return unsound == 0;
    }

    // The places of a wave that a candidate is there for.
    Span span_of(const Candidate& c, int64_t w) const {
        if (c.move < 0) return waves.at(p.starts.place, w, false);
        if (w < c.back) return {0, -1};
        return waves.span(w).within(waves.span(w - c.back).moved(c.along));
    }

    // A row for each candidate of state k: `nodes` at its source plus scale · its score, and `none` where it is not
    // there.
    void assemble(int64_t w, int k, const double* nodes, const Scores* scores, double scale, double none, double* x) {
        const int64_t low = waves.span(w).low, padded = waves.span(w).count() + W - 1;
        for (int n = table.first[k]; n < table.first[k + 1]; ++n, x += own.width) {
            const Candidate& c = table.candidates[n];
            const Span span = span_of(c, w);
            std::fill(x, x + std::min(padded, own.width), none);
            if (span.count() == 0) continue;
            double* const to = x + (span.low - low);
            if (c.move < 0) {
                std::fill(to, to + span.count(), 0.0);
            } else {
                const int64_t source = span.low - c.along - waves.span(w - c.back).low;
                const double* const from = nodes + offset(w - c.back, c.from) + source;
                std::copy(from, from + span.count(), to);
            }
            add(scores[score_of(k, c)], w, span, scale, to);
        }
    }
    Candidates assemble_values(int64_t w, int k) {
        assemble(w, k, values, p.scores, rules.unit, -infinity<double>, own.x.get());
        return {own.x.get(), own.width, table.first[k + 1] - table.first[k], waves.span(w).count()};
    }

    // The probabilities of wave w and state k, by the tape. Returns how many candidates there are.
    template <bool Dots>
    int probabilities(int64_t w, int k, const Scores* z) {
        const Candidates rows = assemble_values(w, k);
        const double* const tape = thresholds + offset(w, k);
        std::copy(tape, tape + rows.places, own.threshold.get());
        if constexpr (Dots) {
            assemble(w, k, own.dots.get(), z, 1, 0, own.y.get());
            rules.weigh_dots(rows, own.threshold.get(), own.y.get(), own.mean.get());
        } else {
            rules.weigh(rows, own.threshold.get());
        }
        return rows.count;
    }

    // --- the ends

    // Calls action(w, k, span) for the ends, wave by wave.
    template <class Action>
    void for_ends(Action action) const {
        for (int64_t w = 0; w < waves.count; ++w) {
            for (int k = 0; k < p.states; ++k) {
                const Span span = waves.at(p.ends.place, w, true);
                if ((p.ends.states >> k & 1) && span.count() > 0) action(w, k, span);
            }
        }
    }
    // `nodes` plus scale · scores at the ends, one after the other. Returns how many there are; whole vectors follow.
    int64_t collect(const double* nodes, const Scores* scores, double scale, double none, double* to) {
        int64_t count = 0;
        for_ends([&](int64_t w, int k, Span span) {
            const double* const from = nodes + offset(w, k) + (span.low - waves.span(w).low);
            std::copy(from, from + span.count(), to + count);
            add(scores[score_of_end(k)], w, span, scale, to + count);
            count += span.count();
        });
        std::fill(to + count, to + count + W, none);
        return count;
    }

    Sink solve_sink() {
        const int64_t count = collect(values, p.scores, rules.unit, -infinity<double>, own.end_x.get());
        return rules.solve_sink(own.end_x.get(), count);
    }

    // --- the sweeps

    void sweep_tangents(const Scores* z) {
        for (int64_t w = 0; w < waves.count; ++w) {
            const Span span = waves.span(w);
            for (int k = 0; k < p.states; ++k) {
                probabilities<true>(w, k, z);
                double* const to = own.dots.get() + offset(w, k);
                std::copy(own.mean.get(), own.mean.get() + span.count(), to);
                add(z[score_of_state(k)], w, span, 1, to);
            }
        }
    }

    // The mass of the ends of wave w; `next` counts them from the last.
    template <bool Dots>
    void arrive(int64_t w, double seed, int64_t& next, Gradients& gradients) const {
        const Span span = waves.at(p.ends.place, w, true);
        for (int k = p.states - 1; k >= 0 && span.count() > 0; --k) {
            if (!(p.ends.states >> k & 1)) continue;
            next -= span.count();
            double *const mass = own.end_x.get() + next, *const dot = own.end_y.get() + next;
            for (int64_t n = 0; n < span.count(); ++n) {
                own.masses[std::size_t(ring(w, k) + span.low + n)] += mass[n] *= seed;
                if constexpr (Dots) own.mass_dots[std::size_t(ring(w, k) + span.low + n)] += dot[n] *= seed;
            }
            gradients.put(score_of_end(k), waves, b, w, span, Dots ? dot : mass);
        }
    }

    // The mass of one wave and state goes to the scores there, and on to the sources.
    template <bool Dots>
    void spread(int64_t w, int k, const Scores* z, Gradients& gradients) {
        const Span span = waves.span(w);
        const int64_t places = span.count();
        const double* const mass = own.masses.get() + ring(w, k) + span.low;
        const double* const dot = Dots ? own.mass_dots.get() + ring(w, k) + span.low : nullptr;
        const int count = probabilities<Dots>(w, k, z);
        gradients.put(score_of_state(k), waves, b, w, span, Dots ? dot : mass);
        for (int n = 0; n < count; ++n) {
            const Candidate& c = table.candidates[table.first[k] + n];
            double *const q = own.x.get() + n * own.width, *const q_dot = own.y.get() + n * own.width;
            for (int64_t m = 0; m < places; ++m) {
                if constexpr (Dots) q_dot[m] = q_dot[m] * mass[m] + q[m] * dot[m];
                q[m] *= mass[m];
            }
            const Span own_span = span_of(c, w);
            const int64_t skipped = own_span.low - span.low;
            gradients.put(score_of(k, c), waves, b, w, own_span, (Dots ? q_dot : q) + skipped);
            if (c.move < 0) continue;
            const int64_t source = ring(w - c.back, c.from) + own_span.low - c.along;
            for (int64_t m = 0; m < own_span.count(); ++m) {
                own.masses[std::size_t(source + m)] += q[skipped + m];
                if constexpr (Dots) own.mass_dots[std::size_t(source + m)] += q_dot[skipped + m];
            }
        }
    }

    template <bool Dots>
    void sweep_back(double seed, const Scores* z, Gradients& gradients) {
        const Sink sink = solve_sink();
        if constexpr (Dots) collect(own.dots.get(), z, 1, 0, own.end_y.get());
        rules.weigh_sink(sink, own.end_x.get(), Dots ? own.end_y.get() : nullptr);
        int64_t next = sink.count;
        gradients.begin(b);
        for (int64_t w = waves.count - 1; w >= 0; --w) {
            arrive<Dots>(w, seed, next, gradients);
            for (int k = p.states - 1; k >= 0; --k) spread<Dots>(w, k, z, gradients);
            for (int k = 0; k < p.states; ++k) {
                std::fill_n(own.masses.get() + ring(w, k), own.width, 0.0);
                if constexpr (Dots) std::fill_n(own.mass_dots.get() + ring(w, k), own.width, 0.0);
            }
        }
        gradients.finish(b);
    }

    // The score of one place.
    double score_at(const Scores& scores, int64_t w, int64_t place) const {
        if (!scores.numbers) return 0;
        const auto line = waves.line(scores, b, w);
        const int64_t at = line.first + place * line.step;
        if (p.is_double) return static_cast<const double*>(line.numbers)[at];
        return double(static_cast<const float*>(line.numbers)[at]);
    }

    // A draw among probabilities, `step` apart from each other.
    static int64_t draw(const double* q, int64_t step, int64_t count, double uniform) {
        double sum = 0, passed = 0;
        for (int64_t n = 0; n < count; ++n) sum += q[n * step];
        int64_t chosen = -1;
        for (int64_t n = 0; n < count && (chosen < 0 || passed <= uniform * sum); ++n) {
            if (q[n * step] > 0) chosen = n;
            passed += q[n * step];
        }
        return chosen;
    }

    struct Node {
        int64_t w, place;
        int k;
    };

    // The probabilities of the candidates of one node, a vector apart from each other.
    void weigh_node(const Node& at, double* x) const {
        const int first = table.first[at.k], count = table.first[at.k + 1] - first;
        std::fill(x, x + count * W, -infinity<double>);
        for (int n = 0; n < count; ++n) {
            const Candidate& c = table.candidates[first + n];
            const Span span = span_of(c, at.w);
            if (at.place < span.low || at.place > span.high) continue;
            x[n * W] = rules.unit * score_at(p.scores[score_of(at.k, c)], at.w, at.place);
            if (c.move >= 0) {
                x[n * W] += values[offset(at.w - c.back, c.from) + at.place - c.along - waves.span(at.w - c.back).low];
            }
        }
        const double threshold[W] = {thresholds[offset(at.w, at.k) + at.place - waves.span(at.w).low]};
        rules.weigh({x, W, count, 1}, threshold);
    }

public:
    TableSweeps(const LatticeProblem& p, const Table& table, const Rules& rules, int64_t b, double* tape, Rows& own)
        : p(p),
          table(table),
          rules(rules),
          b(b),
          waves(Region(p.lengths + 2 * b, p.band[b]), table.by_rows),
          values(tape),
          thresholds(tape + p.rows * p.columns * p.states),
          own(own) {}

    // Whether the scores were sound.
    bool forward(double* value) {
        for (int64_t w = 0; w < waves.count; ++w) {
            const Span span = waves.span(w);
            for (int k = 0; k < p.states; ++k) {
                rules.solve(assemble_values(w, k), own.mean.get(), own.threshold.get());
                add(p.scores[score_of_state(k)], w, span, rules.unit, own.mean.get());
                std::copy(own.mean.get(), own.mean.get() + span.count(), values + offset(w, k));
                std::copy(own.threshold.get(), own.threshold.get() + span.count(), thresholds + offset(w, k));
            }
        }
        *value = solve_sink().value() / rules.unit;
        return !bad;
    }

    void backward(double seed, Gradients& gradients) { sweep_back<false>(seed, nullptr, gradients); }

    void hessian(double seed, const Scores* z, Gradients& gradients) {
        sweep_tangents(z);
        sweep_back<true>(seed, z, gradients);
    }

    // uniforms (draws, longest + 1), paths (draws, longest, 2).
    void sample(int64_t draws, const double* uniforms, int64_t* paths) {
        const int64_t longest = p.longest();
        std::fill(paths, paths + draws * longest * 2, int64_t(-1));
        const Sink sink = solve_sink();
        if (!sink.is_reached()) return;
        rules.weigh_sink(sink, own.end_x.get(), nullptr);
        for (int64_t d = 0; d < draws; ++d, uniforms += longest + 1, paths += longest * 2) {
            Node at = end(draw(own.end_x.get(), 1, sink.count, uniforms[0]));
            int64_t taken = 0;
            for (bool is_start = false; !is_start; ++taken) {
                double q[Table::most * W];
                weigh_node(at, q);
                const int first = table.first[at.k], count = table.first[at.k + 1] - first;
                const Candidate& c = table.candidates[first + draw(q, W, count, uniforms[taken + 1])];
                const int64_t cell = waves.row(at.w, at.place) * p.columns + waves.column(at.w, at.place);
                paths[2 * (longest - 1 - taken)] = cell * p.states + at.k;
                paths[2 * (longest - 1 - taken) + 1] = c.move;
                is_start = c.move < 0;
                at = {at.w - c.back, at.place - c.along, c.from};
            }
            std::rotate(paths, paths + 2 * (longest - taken), paths + 2 * longest);
        }
    }

private:
    // The n-th end.
    Node end(int64_t n) const {
        Node found{};
        for_ends([&](int64_t w, int k, Span span) {
            if (n >= 0 && n < span.count()) found = {w, span.low + n, k};
            n -= span.count();
        });
        return found;
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
