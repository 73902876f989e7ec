// The sweeps over segmentations (Algorithms 1 and 2 of the paper). They compute in double.
#include "segments.h"

#include <atomic>

#include "sequence.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using namespace segments;

// body(member, sequence), over the threads.
template <class S, class Body>
void for_sequences(const SegmentProblem<S>& problem, Body body) {
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, sizeof(S) == 4);
    parallel_for(problem.batch, problem.threads, [&](int64_t member, int) {
        SegmentedSequence<S> sequence(problem, *omega, member);
        body(member, sequence);
    });
}

bool are_zero(const double* numbers) { return !any(load(numbers) != V{}); }

// A number for each node, 0 at first.
struct NodeTable {
    const Array<double> before, after;

    explicit NodeTable(int64_t count) : before(zeros<double>(count)), after(zeros<double>(count)) {}
    NodeArrays arrays() const { return {before.get(), after.get()}; }
};

template <class S>
bool forward(const SegmentProblem<S>& problem, S* value) {
    std::atomic<bool> all_good{true};
    for_sequences(problem, [&](int64_t member, SegmentedSequence<S>& sequence) {
        bool good = true;
        sequence.up([&](const NodeBlock& at) {
            good &= sequence.solve(at, sequence.value.of(at.side) + sequence.place(at));
        });
        double end[lanes];
        good &= sequence.solve(sequence.end(), end);
        if (problem.labels == 1) end[0] = sequence.x[0];  // one label has no end node, which would add Ω at a vertex
        value[member] = S(end[0] / sequence.omega.unit);
        if (!(good && value[member] < infinity<S>)) all_good = false;
    });
    return all_good;
}

// The threshold of the end node, which is not on the tape.
template <class S>
void solve_end(SegmentedSequence<S>& sequence) {
    double unused[lanes];
    sequence.solve(sequence.end(), unused);
}

template <class S>
void backward(const SegmentProblem<S>& problem, const S* seed, const SegmentArrays<S>& gradients) {
    for_sequences(problem, [&](int64_t member, SegmentedSequence<S>& sequence) {
        const NodeTable own(sequence.length * problem.width);
        const NodeArrays mass = own.arrays();
        const SegmentTerms sums = sequence.zero_terms();
        const auto back = [&](const NodeBlock& at, const double* mass_of_nodes) {
            if (are_zero(mass_of_nodes)) return;
            double share[lanes];
            node::shares(sequence.weigh(at, false), sequence.q.get(), mass_of_nodes, share);
            sequence.spread(at, sequence.q.get(), load(share), mass, &sums);
        };
        const double mass_of_end[lanes] = {double(seed[member])};
        solve_end(sequence);
        back(sequence.end(), mass_of_end);
        sequence.down([&](const NodeBlock& at) { back(at, mass.of(at.side) + sequence.place(at)); });
        sequence.write(sums, gradients);
    });
}

// Along a direction: the change of the value of each node, and its mean (node.h).
struct SegmentTangent {
    const SegmentTerms z;
    const NodeTable values, means;
    double end_value[lanes], end_mean[lanes];

    template <class S>
    SegmentTangent(SegmentedSequence<S>& sequence, const SegmentArrays<const S>& direction, int64_t width)
        : z(sequence.read(direction, 1, 0)), values(sequence.length * width), means(sequence.length * width) {
        const auto change = [&](const NodeBlock& at, double* value, double* mean) {
            const node::Matrix of = sequence.weigh(at, true);
            gather(sequence, at);
            node::change(of, sequence.q.get(), sequence.s.get(), sequence.y.get(), value, mean);
        };
        sequence.up([&](const NodeBlock& at) {
            const int64_t place = sequence.place(at);
            change(at, values.arrays().of(at.side) + place, means.arrays().of(at.side) + place);
        });
        solve_end(sequence);
        change(sequence.end(), end_value, end_mean);
    }

    template <class S>
    void gather(const SegmentedSequence<S>& sequence, const NodeBlock& at) const {
        sequence.gather(at, z, values.arrays(), 0, sequence.y.get());
    }
    template <class S>
    const double* mean(const SegmentedSequence<S>& sequence, const NodeBlock& at) const {
        return at.side == Side::end ? end_mean : means.arrays().of(at.side) + sequence.place(at);
    }
};

template <class S>
void hessian(const SegmentProblem<S>& problem, const S* seed, const SegmentArrays<const S>& z,
             const SegmentArrays<S>& products) {
    for_sequences(problem, [&](int64_t member, SegmentedSequence<S>& sequence) {
        const SegmentTangent tangent(sequence, z, problem.width);
        const int64_t count = sequence.length * problem.width;
        const NodeTable own_mass(count), own_change(count);  // of the mass that `backward` has
        const NodeArrays mass = own_mass.arrays(), change = own_change.arrays();
        const SegmentTerms sums = sequence.zero_terms();
        const V one = V{} + 1;
        const auto back = [&](const NodeBlock& at, const double* mass_of_nodes, const double* change_of_nodes) {
            if (are_zero(mass_of_nodes) && are_zero(change_of_nodes)) return;
            const node::Matrix of = sequence.weigh(at, true);
            const double *const q = sequence.q.get(), *const mean = tangent.mean(sequence, at);
            double share[lanes], *const e = sequence.e.get();
            tangent.gather(sequence, at);
            node::along(of, sequence.s.get(), sequence.y.get(), mean, mass_of_nodes, e);
            node::share(of, q, change_of_nodes, true, e);
            sequence.spread(at, e, one, change, &sums);
            node::shares(of, q, mass_of_nodes, share);
            sequence.spread(at, q, load(share), mass, nullptr);
        };
        const double mass_of_end[lanes] = {double(seed[member])}, none[lanes] = {};
        back(sequence.end(), mass_of_end, none);
        sequence.down([&](const NodeBlock& at) {
            const int64_t place = sequence.place(at);
            back(at, mass.of(at.side) + place, change.of(at.side) + place);
        });
        sequence.write(sums, products);
    });
}

// Draws one path from the end to the start. The n-th choice uses the n-th uniform number.
template <class S>
void draw_path(const SegmentProblem<S>& problem, SegmentedSequence<S>& sequence, const double* uniforms,
               int64_t* path) {
    std::fill_n(path, problem.steps, -1);
    const auto draw = [&](const NodeBlock& at, int64_t label) {
        const node::Matrix of = sequence.weigh(at, false);
        return node::draw(sequence.q.get() + label % lanes, of, *uniforms++);
    };
    solve_end(sequence);
    int64_t label = sequence.x[0] > -infinity<double> ? 0 : -1;
    if (problem.labels > 1) label = draw(sequence.end(), 0);
    for (int64_t t = sequence.length - 1; label >= 0;) {
        const int64_t block = label / lanes * lanes, shorter = draw({Side::after, t, block}, label);
        path[t] = shorter * problem.labels + label;
        t -= shorter;
        if (t == 0) return;
        label = draw({Side::before, t--, block}, label);
    }
}

template <class S>
void sample(const SegmentProblem<S>& problem, int64_t draws, int64_t choices, const double* uniforms, int64_t* paths) {
    for_sequences(problem, [&](int64_t member, SegmentedSequence<S>& sequence) {
        Pace pace;
        for (int64_t n = member * draws; n < (member + 1) * draws; ++n) {
            pace.spend(sequence.length * lanes);
            draw_path(problem, sequence, uniforms + n * choices, paths + n * problem.steps);
        }
    });
}

}  // namespace

template <class S>
SegmentKernels<S> segment_kernels() {
    return {forward<S>, backward<S>, hessian<S>, sample<S>};
}
template SegmentKernels<float> segment_kernels<float>();
template SegmentKernels<double> segment_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
