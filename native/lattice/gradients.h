// Where the gradients of scores land: in their arrays, or summed where a score is shared.
#pragma once

#include "waves.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// Those of one thread.
class Gradients {
    const LatticeProblem& p;
    const Scores* const out;
    Array<double> all_sums;
    double* sums[3 * most_states + most_moves];  // of shared scores

    bool is_shared_along_batch(int n) const { return out[n].batch == 0 && p.batch > 1; }
    int64_t size(int n) const { return (out[n].row ? p.rows : 1) * (out[n].column ? p.columns : 1); }

    template <class S>
    S* at(int n, int64_t b) const {
        return static_cast<S*>(out[n].numbers) + b * out[n].batch;
    }

    template <class S>
    static void store_along(S* to, int64_t step, int64_t count, const double* masses) {
        for (int64_t n = 0; n < count; ++n) to[n * step] = S(masses[n]);
    }
    static void add_along(double* to, int64_t step, int64_t count, const double* masses) {
        if (step != 0) {
            for (int64_t n = 0; n < count; ++n) to[n * step] += masses[n];
        } else {
            double sum = 0;
            for (int64_t n = 0; n < count; ++n) sum += masses[n];
            *to += sum;
        }
    }

    // From the sums to the array of lattice b.
    void write(int n, int64_t b, const double* from) const {
        if (p.is_double) {
            std::copy(from, from + size(n), at<double>(n, b));
        } else {
            std::transform(from, from + size(n), at<float>(n, b), [](double x) { return float(x); });
        }
    }

public:
    Gradients(const LatticeProblem& p, const Scores* out) : p(p), out(out) {
        int64_t total = 0, place = 0;
        for (int n = 0; n < p.scores_count(); ++n) total += is_summed(n) ? size(n) : 0;
        all_sums = zeros<double>(total);
        for (int n = 0; n < p.scores_count(); ++n) {
            sums[n] = is_summed(n) ? all_sums.get() + place : nullptr;
            place += is_summed(n) ? size(n) : 0;
        }
    }

    bool is_wanted(int n) const { return out[n].numbers; }
    bool is_summed(int n) const {
        return is_wanted(n) && (is_shared_along_batch(n) || size(n) < p.rows * p.columns);
    }

    // Before lattice b: cells that are never reached have no gradient.
    void begin(int64_t b) {
        for (int n = 0; n < p.scores_count(); ++n) {
            if (!is_wanted(n)) continue;
            if (is_summed(n)) {
                if (!is_shared_along_batch(n)) std::fill(sums[n], sums[n] + size(n), 0.0);
            } else if (p.is_double) {
                std::fill_n(at<double>(n, b), size(n), 0.0);
            } else {
                std::fill_n(at<float>(n, b), size(n), 0.0f);
            }
        }
    }

    // The masses at the places of a span.
    void put(int n, const Waves& waves, int64_t b, int64_t w, Span span, const double* masses) {
        if (!is_wanted(n) || span.count() == 0) return;
        const auto line = waves.line(out[n], sums[n] ? 0 : b, w);
        const int64_t first = line.first + span.low * line.step;
        if (sums[n]) {
            add_along(sums[n] + first, line.step, span.count(), masses);
        } else if (p.is_double) {
            store_along(static_cast<double*>(line.numbers) + first, line.step, span.count(), masses);
        } else {
            store_along(static_cast<float*>(line.numbers) + first, line.step, span.count(), masses);
        }
    }

    // After lattice b.
    void finish(int64_t b) {
        for (int n = 0; n < p.scores_count(); ++n) {
            if (is_wanted(n) && is_summed(n) && !is_shared_along_batch(n)) write(n, b, sums[n]);
        }
    }
    // After all of them: the sums of `count` threads, the first of which this is.
    void finish_shared(Gradients* const* others, int count) {
        for (int n = 0; n < p.scores_count(); ++n) {
            if (!is_wanted(n) || !is_shared_along_batch(n)) continue;
            for (int t = 1; t < count; ++t) {
                for (int64_t m = 0; m < size(n); ++m) sums[n][m] += others[t]->sums[n][m];
            }
            write(n, 0, sums[n]);
        }
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
