#include "labels.h"

#include <cmath>

namespace bellmax {
namespace {

using std::int64_t;

// Calls visit(array, place) for every score that the labels of sequence b add up.
template <class S, class Visit>
void walk(const ScoresProblem<S>& p, const int64_t* labels, int64_t b, Visit visit) {
    const int64_t length = p.lengths[b], states = p.states;
    int64_t before = 0;
    for (int64_t n = 0; n < length; ++n) {
        const int64_t t = visited(p, b, n), state = labels[b * p.steps + t];
        visit(&Scores<const S>::emissions, &Scores<S>::emissions, (b * p.steps + t) * states + state);
        if (n == 0) {
            visit(&Scores<const S>::start, &Scores<S>::start, b * p.start_batch + state);
        } else {
            const int64_t place = b * p.transition_batch + (t - 1) * p.transition_step;
            visit(&Scores<const S>::transitions, &Scores<S>::transitions, place + state * states + before);
        }
        before = state;
    }
    if (length) visit(&Scores<const S>::end, &Scores<S>::end, b * p.end_batch + before);
}

}  // namespace

template <class S>
bool score_labels(const ScoresProblem<S>& p, const int64_t* labels, int64_t ignored, S* scores) {
    for (int64_t b = 0; b < p.batch; ++b) {
        for (int64_t n = 0; n < p.lengths[b]; ++n) {
            const int64_t state = labels[b * p.steps + visited(p, b, n)];
            if (state < 0 || state >= p.states || state == ignored) return false;
        }
        double total = 0;
        walk(p, labels, b, [&](auto scores, auto, int64_t place) { total += double((p.scores.*scores)[place]); });
        if (!std::isfinite(total)) return false;
        scores[b] = S(total);
    }
    return true;
}

template <class S>
void subtract_labels(const ScoresProblem<S>& p, const int64_t* labels, const S* seed, const Scores<S>& gradient) {
    for (int64_t b = 0; b < p.batch; ++b) {
        walk(p, labels, b, [&](auto, auto scores, int64_t place) { (gradient.*scores)[place] -= seed[b]; });
    }
}

template bool score_labels(const ScoresProblem<float>&, const int64_t*, int64_t, float*);
template bool score_labels(const ScoresProblem<double>&, const int64_t*, int64_t, double*);
template void subtract_labels(const ScoresProblem<float>&, const int64_t*, const float*, const Scores<float>&);
template void subtract_labels(const ScoresProblem<double>&, const int64_t*, const double*, const Scores<double>&);

}  // namespace bellmax
