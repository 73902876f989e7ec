// Where masses land: in the gradient itself if each of its rows belongs to one row of one lattice, else in sums of
// doubles, of each lattice for itself.
#pragma once

#include <vector>

#include "lines.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace row_engine {

class Gradients {
    const RowsProblem& p;
    const TermTensor* const out;
    std::vector<int64_t> offsets;  // of the rows of each tensor that masses land in directly
    std::vector<char> direct;
    std::vector<Array<double>> sums;  // (batch, size)

    template <class S>
    void finish(int n) const {
        const int64_t size = out[n].size(), own = out[n].is_shared ? p.batch : 1;
        S* const to = static_cast<S*>(out[n].numbers);
        for (int64_t b = 0; b < p.batch; b += own) {
            const double* const from = sums[std::size_t(n)].get() + b * size;
            for (int64_t m = 0; m < size; ++m) {
                double sum = 0;
                for (int64_t k = 0; k < own; ++k) sum += from[k * size + m];
                to[b * size + m] = S(sum);
            }
        }
    }

    template <class S>
    static void clear(const TermTensor& tensor, int64_t b, Span rows) {
        const Span there = common(rows, {0, tensor.shape[0]});
        if (there.is_empty()) return;
        const int64_t wide = tensor.size() / tensor.shape[0];
        S* const from = static_cast<S*>(tensor.numbers) + b * tensor.size();
        std::fill(from + there.from * wide, from + there.to * wide, S(0));
    }
    void clear(int n, int64_t b, Span rows) const {
        p.is_double ? clear<double>(out[n], b, rows) : clear<float>(out[n], b, rows);
    }

public:
    Gradients(const RowsProblem& p, const TermTensor* out) : p(p), out(out) {
        for (int n = 0; n < p.scores_tensors; ++n) {
            bool is_direct = out[n].dims > 0 && !out[n].is_shared;
            int64_t offset = 0;
            for (int t = 0, found = 0; t < p.terms_count; ++t) {
                const RowTerm& term = p.terms[t];
                if (term.is_mask || term.tensor != n) continue;
                if (found++ == 0) offset = term.axes[0].offset;
                is_direct = is_direct && term.axes[0].follows == Follows::row && term.axes[0].offset == offset;
            }
            offsets.push_back(offset);
            direct.push_back(is_direct);
            sums.push_back(is_direct ? nullptr : zeros<double>(p.batch * out[n].size()));
        }
    }

    // Of one lattice.
    class Own {
        const Gradients& all;
        const int64_t b;

    public:
        Own(const Gradients& all, const Frame& f) : all(all), b(f.b) {
            for (int n = 0; n < all.p.scores_tensors; ++n) {
                const int64_t first = all.offsets[std::size_t(n)];
                if (!all.direct[std::size_t(n)]) continue;
                all.clear(n, b, {0, first});
                all.clear(n, b, {first + f.region.rows, all.out[n].shape[0]});
            }
        }
        // Before anything lands in row i.
        void clear(int64_t i) const {
            for (int n = 0; n < all.p.scores_tensors; ++n) {
                const int64_t row = i + all.offsets[std::size_t(n)];
                if (all.direct[std::size_t(n)]) all.clear(n, b, {row, row + 1});
            }
        }
        template <class Real>
        void land(const Term& term, int64_t i, Span span, const Real* masses) const {
            const int n = term.number();
            const TermTensor& to = all.out[n];
            if (!all.direct[std::size_t(n)]) {
                term.land(i, span, masses, all.sums[std::size_t(n)].get() + b * to.size());
            } else if (all.p.is_double) {
                term.land(i, span, masses, term.numbers<double>(to));
            } else {
                term.land(i, span, masses, term.numbers<float>(to));
            }
        }
    };

    void finish() const {
        for (int n = 0; n < p.scores_tensors; ++n) {
            if (!sums[std::size_t(n)]) continue;
            p.is_double ? finish<double>(n) : finish<float>(n);
        }
    }
};

}  // namespace row_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
