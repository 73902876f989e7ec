// Sweeps under negentropy as products: a_t ∝ exp(values of frame t), by sums of multiplications over the arcs.
//
// Each member has its scale: with E = exp(log_probs[t] − max) and W = exp(arcs − max), a_t = E ∘ (W a_{t−1}) / 2^k, where k
// is chosen so that the greatest number of a frame is in [1, 2). Backward, b_t is the derivative of log Z by a_t, so that
// Σ a_t b_t = 1, and the expected number of times that an arc is taken is a · W E b 2^−k.
//
// A number that underflows is lost with all paths through its node. If no factor and no number is small, nothing can
// underflow. From the first frame on where one is, a second sweep raises each number to more than what can be lost. If
// that changes Z, the member is swept in log space.
#include "exp.h"

#include <atomic>

#include "../omega/negentropy.h"
#include "frames.h"

namespace bellmax::BELLMAX_ARCH::automata {
namespace {

using Mask = decltype(V{} < V{});
constexpr double least_factor = 1e-50, least_number = 1e-200;  // a product of two factors and a number is normal
// More than what underflows in a sum of products, next to a greatest number that was not scaled or is about 1.
constexpr double most_lost = 1e-300, negligible = 1e-250;

// Edges into a place that have the same label.
struct Run {
    int32_t begin, end;
};

// The emitting edges of a plan in runs; begin: by place.
struct Runs {
    std::vector<int32_t> begin;
    std::vector<Run> runs;

    explicit Runs(const Plan& plan) {
        for (int64_t p = 0; p < plan.states; ++p) {
            begin.push_back(int32_t(runs.size()));
            for (int32_t e = plan.begin[std::size_t(p)]; e < plan.middle[std::size_t(p)]; ++e) {
                if (e == plan.begin[std::size_t(p)] || !continues(plan, e)) runs.push_back({e, e});
                runs.back().end = e + 1;
            }
        }
        begin.push_back(int32_t(runs.size()));
    }

private:
    static bool continues(const Plan& plan, int64_t e) {
        const int32_t* const label = plan.label.data() + e * plan.copies;
        return std::equal(label, label + plan.copies, label - plan.copies);
    }
};

// Numbers and exponents of the frames of a block, and of the first frame of the next block, which stays when the block
// before is visited.
class Block {
    const int64_t size;
    int64_t first = 0;
    const Array<double> numbers;
    double *low, *high;

public:
    const int64_t stride;

    Block(int64_t numbers_of_frame, int64_t frames)
        : size(numbers_of_frame + lanes),
          numbers(scratch<double>((frames + 1) * size)),
          low(numbers.get()),
          high(low + frames * size),
          stride(frames) {}
    void move_to(int64_t frame) {
        first = frame;
        std::swap(low, high);
    }
    double* at(int64_t t) const {
        return t == first ? low : t == first + stride ? high : numbers.get() + (t - first) * size;
    }
    double* exponent(int64_t t) const { return at(t) + size - lanes; }
};

template <class S, bool is_shared, bool has_one_weight>
class Products {
    static constexpr int copies = is_shared ? 1 : lanes, columns = has_one_weight ? 1 : lanes;
    const Members<S>& group;
    const Plan& plan = group.plan;
    const AutomatonProblem<S>& problem = group.problem;
    static constexpr double unit = omega::Negentropy<double>::unit;
    const Runs runs{plan};
    const int64_t size = plan.states * lanes;
    const Array<double> weight = scratch<double>(plan.edges * columns), start = scratch<double>(size),
                        final = scratch<double>(size), frame = scratch<double>(plan.labels * lanes);
    V arc_top, start_top, final_top;
    Mask is_small{}, is_bad{};
    bool has_invalid = false;
    Pace pace;

public:
    explicit Products(const Members<S>& own) : group(own) { read_constants(); }

    // --- forward

    bool forward(S* value, std::vector<char>& fails) {
        const Array<double> numbers = scratch<double>(4 * size);
        double *before = numbers.get(), *here = before + size;
        double *raised_before = here + size, *raised = raised_before + size;
        V offset = start_top, sums{}, most{};
        bool good = true, may_lose = any(is_small);
        for (int64_t t = 0; t <= group.longest; ++t) {
            if (t > 0) offset += read_frame(t) + arc_top;
            if (!may_lose && any(is_small)) {
                may_lose = true;
                std::copy_n(before, size, raised_before);
            }
            const V exponent = scale_of(solve(t, before, here));
            scale(here, exponent);
            if (may_lose) {
                solve(t, raised_before, raised);
            } else if (any(is_small)) {
                may_lose = true;
                for (int64_t n = 0; n < size; n += lanes) store(raised + n, load(here + n) * power(exponent));
            }
            if (may_lose) raise(raised, exponent);
            offset += exponent;
            if (problem.tape && t % problem.frames_per_row == 0) {
                group.store_row(t, 0, here);
                group.store_scale(t, 0, offset);
                group.store_scale(t, 1, exponent);
            }
            if (group.ends_at(t)) {
                const V sum = end_sum(here), log = log2_of(sum) + offset + final_top;
                const V raised_sum = may_lose ? end_sum(raised) + most_lost * double(plan.states) : sum;
                for (int l = 0; l < group.members; ++l) {
                    if (group.length[l] != t) continue;
                    sums[l] = sum[l];
                    most[l] = raised_sum[l];
                    value[group.b[l]] = S(log[l] / unit);
                }
            }
            std::swap(before, here);
            std::swap(raised_before, raised);
        }
        is_bad |= is_small & !(most <= sums * (1 + 1e-13));
        for (int l = 0; l < group.members; ++l) {
            if (is_bad[l]) fails[std::size_t(group.b[l])] = true;
            else good &= value[group.b[l]] < infinity<S>;
        }
        return good && !has_invalid;
    }

    // --- backward

    void backward(const S* seed, const AutomatonArrays<S>& gradients) {
        Block block(size, problem.frames_per_row);
        const Array<double> masses = zeros<double>(2 * size);
        double *here = masses.get(), *before = here + size;
        const Terms sums = group.zero_terms();
        const V own = seeds(seed);
        for (int64_t first = group.longest / block.stride * block.stride; first >= 0; first -= block.stride) {
            const int64_t last = std::min(first + block.stride, group.longest);
            block.move_to(first);
            group.load_row(first, 0, block.at(first));
            store(block.exponent(first), group.load_scale(first, 1));
            // The first frame of the next block is there from before.
            for (int64_t t = first + 1; t <= last && t < first + block.stride; ++t) {
                read_frame(t);
                store(block.exponent(t), solve_and_scale(t, block.at(t - 1), block.at(t)));
            }
            for (int64_t t = last; t > first || t == 0; --t) {
                const double* const a = block.at(t);
                if (t > 0) read_frame(t);
                if (group.ends_at(t)) add_end(t, a, here, sums);
                std::fill_n(sums.frame.get(), plan.labels * lanes, 0.0);
                spread(t, power(-load(block.exponent(t))), t > 0 ? block.at(t - 1) : nullptr, a, before, here, sums);
                if (t > 0) group.write_frame(sums.frame.get(), t - 1, own, gradients);
                std::swap(here, before);
                std::fill_n(before, size, 0.0);
            }
        }
        finish(sums, own, gradients);
    }

    // --- Hessian products: with each number its derivative along z

    void hessian(const S* seed, const AutomatonArrays<const S>& direction, const AutomatonArrays<S>& products) {
        int64_t stride = 1;
        while (stride * stride <= group.longest) ++stride;
        const Terms z = read_direction(direction);
        const int64_t kept = 2 * size + lanes;  // with the exponent
        const Array<double> saved = scratch<double>((group.longest / stride + 1) * kept);
        const Array<double> masses = zeros<double>(4 * size);
        Block block(2 * size, stride);
        double *here = masses.get(), *before = here + 2 * size;
        const Terms sums = group.zero_terms();
        const V own = seeds(seed);
        const auto read = [&](int64_t t) {
            read_frame(t);
            group.read_frame(direction, t - 1, 1, 0, z.frame.get());
            clear_closed(z.frame.get(), frame.get(), plan.labels);
        };
        const auto visit = [&](int64_t first, bool is_again) {
            block.move_to(first);
            if (first > 0) std::copy_n(&saved[std::size_t(first / stride * kept)], kept, block.at(first));
            else store(block.exponent(0), solve_along(0, nullptr, block.at(0), z));
            const int64_t last = std::min(first + stride - is_again, group.longest);
            for (int64_t t = first + 1; t <= last; ++t) {
                read(t);
                store(block.exponent(t), solve_along(t, block.at(t - 1), block.at(t), z));
            }
            if (!is_again && last == first + stride) {
                std::copy_n(block.at(last), kept, &saved[std::size_t(last / stride * kept)]);
            }
        };
        const int64_t end = group.longest / stride * stride;
        for (int64_t first = 0; first <= end; first += stride) visit(first, false);
        for (int64_t first = end; first >= 0; first -= stride) {
            visit(first, true);
            for (int64_t t = std::min(first + stride, group.longest); t > first || t == 0; --t) {
                if (t > 0) read(t);
                if (group.ends_at(t)) add_end_along(t, block.at(t), here, z, sums);
                std::fill_n(sums.frame.get(), plan.labels * lanes, 0.0);
                spread_along(t, power(-load(block.exponent(t))), t > 0 ? block.at(t - 1) : nullptr, block.at(t), before,
                             here, z, sums);
                if (t > 0) group.write_frame(sums.frame.get(), t - 1, own, products);
                std::swap(here, before);
                std::fill_n(before, 2 * size, 0.0);
            }
        }
        finish(sums, own, products);
    }

private:
    // --- scores

    V weight_of(int64_t e) const {
        if constexpr (has_one_weight) return broadcast(weight[std::size_t(e)]);
        else return load(&weight[std::size_t(e * lanes)]);
    }

    V seeds(const S* seed) const {
        V v{};
        for (int l = 0; l < group.members; ++l) v[l] = double(seed[group.b[l]]);
        return v;
    }

    // x becomes its exponential, less the greatest of each lane, which is the result; 0 if that is −∞.
    V exponentials(double* x, int64_t count) {
        V top = V{} + no_score;
        auto invalid = top > top;
        for (int64_t n = 0; n < count; ++n) {
            const V own = load(x + n * lanes);
            invalid |= !(own < V{} + infinity<double>);
            top = greater<double>(own, top);
        }
        has_invalid |= any(invalid);
        top = top > V{} + no_score ? top : V{};
        const V least = V{} - 166;  // 2^−166 is about least_factor
        for (int64_t n = 0; n < count; ++n) {
            const V own = load(x + n * lanes) - top;
            is_small |= (own < least) & (own > V{} + no_score);
            store(x + n * lanes, exp2_of(own));
        }
        return top;
    }

    V read_frame(int64_t t) {
        group.read_frame(problem.theta, t - 1, unit, no_score, frame.get());
        return exponentials(frame.get(), plan.labels);
    }

    void read_constants() {
        const Terms theta = group.read(problem.theta, unit, no_score);
        std::copy_n(theta.start.get(), size, start.get());
        start_top = exponentials(start.get(), plan.states);
        final_top = exponentials(theta.final.get(), plan.states);
        for (int64_t p = 0; p < plan.states; ++p) {
            for (int l = 0; l < lanes; ++l) {
                final[std::size_t(p * lanes + l)] = theta.final[std::size_t(
                    plan.state_at[std::size_t(plan.copy(p, l))] * lanes + l)];
            }
        }
        arc_top = V{} + no_score;
        for_edges([&](int64_t e, bool is_emitting) {
            const V own = load(&theta.arcs[std::size_t(e * lanes)]);
            has_invalid |= any(!(own < V{} + infinity<double>));
            if (is_emitting) arc_top = greater<double>(own, arc_top);
        });
        if constexpr (has_one_weight) arc_top = broadcast(arc_top[0]);  // of the first lane, which has a member
        arc_top = arc_top > V{} + no_score ? arc_top : V{};
        for_edges([&](int64_t e, bool is_emitting) {
            const V x = load(&theta.arcs[std::size_t(e * lanes)]) - (is_emitting ? arc_top : V{});
            is_small |= (x < V{} - 166) & (x > V{} + no_score);
            is_bad |= x > V{} + 330;
            const V w = exp2_of(lesser<double>(x, V{} + 330));
            if constexpr (has_one_weight) weight[std::size_t(e)] = w[0];
            else store(&weight[std::size_t(e * lanes)], w);
        });
    }
    template <class Body>
    void for_edges(Body body) const {
        for (int64_t p = 0; p < plan.states; ++p) {
            const int64_t middle = plan.middle[std::size_t(p)];
            for (int64_t e = plan.begin[std::size_t(p)]; e < plan.begin[std::size_t(p) + 1]; ++e) body(e, e < middle);
        }
    }

    static V power(V exponent) { return exp2_of(exponent); }

    // --- frames

    // Computes the numbers of a frame, not yet scaled, and returns the greatest.
    V solve(int64_t t, const double* __restrict before, double* __restrict here) {
        pace.spend(plan.edges);
        const int32_t *const source = plan.source.data(), *const label = plan.label.data();
        V top{};
        for (int64_t p = 0; p < plan.states; ++p) {
            V total{};
            int32_t e = plan.begin[std::size_t(p)];
            if (t == 0) total = load(&start[std::size_t(p * lanes)]);
            for (int32_t r = runs.begin[std::size_t(p)]; t > 0 && r < runs.begin[std::size_t(p) + 1]; ++r) {
                const Run& run = runs.runs[std::size_t(r)];
                V sum{}, other{};
                for (e = run.begin; e + 1 < run.end; e += 2) {
                    sum += weight_of(e) * pick<is_shared>(before, source + e * copies);
                    other += weight_of(e + 1) * pick<is_shared>(before, source + (e + 1) * copies);
                }
                if (e < run.end) sum += weight_of(e) * pick<is_shared>(before, source + e * copies);
                total += pick<is_shared>(frame.get(), label + run.begin * copies) * (sum + other);
            }
            for (e = plan.middle[std::size_t(p)]; e < plan.begin[std::size_t(p) + 1]; ++e) {
                total += weight_of(e) * pick<is_shared>(here, source + e * copies);
            }
            store(here + p * lanes, total);
            top = greater<double>(total, top);
        }
        return top;
    }

    // The exponent by which the numbers of a frame are scaled.
    V scale_of(V top) {
        using Bits = typename Shape<V>::Bits;
        const V most = V{} + 1e200;
        is_bad |= !(top < most);
        const Bits field = bits<Bits>(top) >> Format<double>::mantissa;
        V exponent{};
        for (int l = 0; l < lanes; ++l) {
            if (top[l] > 0 && top[l] < most[l]) exponent[l] = double(field[l]) - Format<double>::bias;
        }
        is_small |= (top < V{} + least_number) & (top > V{});
        return exponent;
    }
    void scale(double* numbers, V exponent) {
        const V factor = power(-exponent);
        for (int64_t n = 0; n < size; n += lanes) {
            const V own = load(numbers + n) * factor;
            is_small |= (own < V{} + least_number) & (own > V{});
            store(numbers + n, own);
        }
    }
    V solve_and_scale(int64_t t, const double* before, double* here) {
        const V exponent = scale_of(solve(t, before, here));
        scale(here, exponent);
        return exponent;
    }
    void raise(double* numbers, V exponent) const {
        const V factor = power(-exponent), least = greater<double>(V{} + negligible, most_lost * factor);
        for (int64_t n = 0; n < size; n += lanes) {
            store(numbers + n, greater<double>(load(numbers + n) * factor, least));
        }
    }

    V end_sum(const double* here) const {
        V sum{};
        for (int64_t p = 0; p < plan.states; ++p) sum += load(here + p * lanes) * load(&final[std::size_t(p * lanes)]);
        return sum;
    }

    // The lanes whose members end at a frame, and 0 in the others.
    V ending(int64_t t, V v) const {
        for (int l = 0; l < lanes; ++l) v[l] = group.length[l] == t ? v[l] : 0;
        return v;
    }

    void add_end(int64_t t, const double* a, double* b, const Terms& sums) const {
        const V sum = end_sum(a), factor = ending(t, sum > V{} ? 1 / sum : V{});
        for (int64_t p = 0; p < plan.states; ++p) {
            const V flow = load(&final[std::size_t(p * lanes)]) * factor, part = flow * load(a + p * lanes);
            store(b + p * lanes, load(b + p * lanes) + flow);
            for (int l = 0; l < lanes; ++l) {
                sums.final[std::size_t(plan.state_at[std::size_t(plan.copy(p, l))] * lanes + l)] += part[l];
            }
        }
    }

    void finish(const Terms& sums, V factor, const AutomatonArrays<S>& to) const {
        for (int64_t e = 0; e < plan.edges; ++e) {
            const V w = weight_of(e), sum = load(&sums.arcs[std::size_t(e * lanes)]);
            store(&sums.arcs[std::size_t(e * lanes)], w > V{} ? w * sum : V{});
        }
        group.write(sums, factor, to);
    }

    // From b of a frame, `shrink` = 2^−k, to b of the frame before and to the sums. The sums of arcs do not contain W yet.
    void spread(int64_t t, V shrink, const double* __restrict a_before, const double* a, double* __restrict b_before,
                double* b, const Terms& sums) {
        pace.spend(2 * plan.edges);
        const int32_t *const source = plan.source.data(), *const label = plan.label.data();
        double* __restrict const arcs = sums.arcs.get();
        for (int64_t p = plan.states - 1; p >= 0; --p) {
            const V number = load(a + p * lanes), own = number > V{} ? load(b + p * lanes) : V{};
            if (!any(own != V{})) continue;
            for (int32_t e = plan.middle[std::size_t(p)]; e < plan.begin[std::size_t(p) + 1]; ++e) {
                const int32_t* const from = source + e * copies;
                add<is_shared>(b, from, weight_of(e) * own);
                store(arcs + e * lanes, load(arcs + e * lanes) + pick<is_shared>(a, from) * own);
            }
            const V scaled = own * shrink;
            if (t == 0) {
                store(&sums.start[std::size_t(p * lanes)], load(&start[std::size_t(p * lanes)]) * scaled);
                continue;
            }
            for (int32_t r = runs.begin[std::size_t(p)]; r < runs.begin[std::size_t(p) + 1]; ++r) {
                const Run& run = runs.runs[std::size_t(r)];
                const int32_t* const row = label + run.begin * copies;
                const V gain = pick<is_shared>(frame.get(), row) * scaled;
                V sum{};
                for (int32_t e = run.begin; e < run.end; ++e) {
                    const int32_t* const from = source + e * copies;
                    const V w = weight_of(e), before = pick<is_shared>(a_before, from);
                    sum += w * before;
                    add<is_shared>(b_before, from, w * gain);
                    store(arcs + e * lanes, load(arcs + e * lanes) + before * gain);
                }
                add<is_shared>(sums.frame.get(), row, gain * sum);
            }
        }
    }

    // --- along a direction: numbers of a frame, and then their derivatives

    Terms read_direction(const AutomatonArrays<const S>& direction) const {
        Terms z = group.read(direction, 1, 0);
        clear_closed(z.start.get(), start.get(), plan.states);
        for (int64_t e = 0; e < plan.edges; ++e) {
            double* const own = &z.arcs[std::size_t(e * lanes)];
            store(own, weight_of(e) > V{} ? load(own) : V{});
        }
        return z;
    }
    static void clear_closed(double* z, const double* factor, int64_t count) {
        for (int64_t n = 0; n < count; ++n) {
            store(z + n * lanes, load(factor + n * lanes) > V{} ? load(z + n * lanes) : V{});
        }
    }
    // The direction of the final score of a place.
    V final_along(const Terms& z, int64_t p) const {
        V own{};
        for (int l = 0; l < lanes; ++l) {
            own[l] = z.final[std::size_t(plan.state_at[std::size_t(plan.copy(p, l))] * lanes + l)];
        }
        return load(&final[std::size_t(p * lanes)]) > V{} ? own : V{};
    }

    V solve_along(int64_t t, const double* __restrict before, double* __restrict here, const Terms& z) {
        pace.spend(2 * plan.edges);
        const int32_t *const source = plan.source.data(), *const label = plan.label.data();
        V top{};
        for (int64_t p = 0; p < plan.states; ++p) {
            V total{}, change{};
            if (t == 0) {
                total = load(&start[std::size_t(p * lanes)]);
                change = total * load(&z.start[std::size_t(p * lanes)]);
            }
            for (int32_t r = runs.begin[std::size_t(p)]; t > 0 && r < runs.begin[std::size_t(p) + 1]; ++r) {
                const Run& run = runs.runs[std::size_t(r)];
                V sum{}, along{};
                for (int32_t e = run.begin; e < run.end; ++e) {
                    const V w = weight_of(e), a = pick<is_shared>(before, source + e * copies);
                    sum += w * a;
                    along += w * (pick<is_shared>(before + size, source + e * copies) + a * load(&z.arcs[e * lanes]));
                }
                const V factor = pick<is_shared>(frame.get(), label + run.begin * copies);
                total += factor * sum;
                change += factor * (along + sum * pick<is_shared>(z.frame.get(), label + run.begin * copies));
            }
            for (int32_t e = plan.middle[std::size_t(p)]; e < plan.begin[std::size_t(p) + 1]; ++e) {
                const V w = weight_of(e), a = pick<is_shared>(here, source + e * copies);
                total += w * a;
                change += w * (pick<is_shared>(here + size, source + e * copies) + a * load(&z.arcs[e * lanes]));
            }
            store(here + p * lanes, total);
            store(here + size + p * lanes, change);
            top = greater<double>(total, top);
        }
        const V exponent = scale_of(top), factor = power(-exponent);
        scale(here, exponent);
        for (double* own = here + size; own < here + 2 * size; own += lanes) store(own, load(own) * factor);
        return exponent;
    }

    void add_end_along(int64_t t, const double* a, double* b, const Terms& z, const Terms& sums) const {
        const V sum = end_sum(a), factor = ending(t, sum > V{} ? 1 / sum : V{});
        V change{};
        for (int64_t p = 0; p < plan.states; ++p) {
            const double* const own = a + p * lanes;
            change += load(&final[std::size_t(p * lanes)]) * (load(own + size) + load(own) * final_along(z, p));
        }
        change *= factor;
        for (int64_t p = 0; p < plan.states; ++p) {
            const double* const own = a + p * lanes;
            const V flow = load(&final[std::size_t(p * lanes)]) * factor, along = flow * (final_along(z, p) - change);
            const V part = load(own + size) * flow + load(own) * along;
            store(b + p * lanes, load(b + p * lanes) + flow);
            store(b + size + p * lanes, load(b + size + p * lanes) + along);
            for (int l = 0; l < lanes; ++l) {
                sums.final[std::size_t(plan.state_at[std::size_t(plan.copy(p, l))] * lanes + l)] += part[l];
            }
        }
    }

    void spread_along(int64_t t, V shrink, const double* __restrict a_before, const double* a,
                      double* __restrict b_before, double* b, const Terms& z, const Terms& sums) {
        pace.spend(4 * plan.edges);
        const int32_t *const source = plan.source.data(), *const label = plan.label.data();
        double* __restrict const arcs = sums.arcs.get();
        const auto add_flow = [&](int32_t e, V flow) { store(arcs + e * lanes, load(arcs + e * lanes) + flow); };
        for (int64_t p = plan.states - 1; p >= 0; --p) {
            const auto is_reached = load(a + p * lanes) > V{};
            const V own = is_reached ? load(b + p * lanes) : V{}, change = is_reached ? load(b + size + p * lanes) : V{};
            if (!any((own != V{}) | (change != V{}))) continue;
            for (int32_t e = plan.middle[std::size_t(p)]; e < plan.begin[std::size_t(p) + 1]; ++e) {
                const int32_t* const from = source + e * copies;
                const V w = weight_of(e), along = change + own * load(&z.arcs[e * lanes]);
                add<is_shared>(b, from, w * own);
                add<is_shared>(b + size, from, w * along);
                add_flow(e, pick<is_shared>(a + size, from) * own + pick<is_shared>(a, from) * along);
            }
            const V scaled = own * shrink, scaled_change = change * shrink;
            if (t == 0) {
                store(&sums.start[std::size_t(p * lanes)],
                      load(&start[std::size_t(p * lanes)]) *
                          (scaled_change + scaled * load(&z.start[std::size_t(p * lanes)])));
                continue;
            }
            for (int32_t r = runs.begin[std::size_t(p)]; r < runs.begin[std::size_t(p) + 1]; ++r) {
                const Run& run = runs.runs[std::size_t(r)];
                const int32_t* const row = label + run.begin * copies;
                const V factor = pick<is_shared>(frame.get(), row), gain = factor * scaled,
                        gain_change = factor * (scaled_change + scaled * pick<is_shared>(z.frame.get(), row));
                V sum{};
                for (int32_t e = run.begin; e < run.end; ++e) {
                    const int32_t* const from = source + e * copies;
                    const V w = weight_of(e), along = gain_change + gain * load(&z.arcs[e * lanes]);
                    const V flow = pick<is_shared>(a_before + size, from) * gain + pick<is_shared>(a_before, from) * along;
                    add<is_shared>(b_before, from, w * gain);
                    add<is_shared>(b_before + size, from, w * along);
                    add_flow(e, flow);
                    sum += w * flow;
                }
                add<is_shared>(sums.frame.get(), row, sum);
            }
        }
    }
};

// action(products) with the products of a group.
template <class S, class Action>
void with_products(const Members<S>& group, Action action) {
    if (!group.problem.is_shared) {
        Products<S, false, false> products(group);
        action(products);
    } else if (group.problem.theta.arcs.is_shared) {
        Products<S, true, true> products(group);
        action(products);
    } else {
        Products<S, true, false> products(group);
        action(products);
    }
}

}  // namespace

template <class S>
std::vector<int64_t> forward_in_exp_space(const AutomatonProblem<S>& problem, S* value, bool& good) {
    std::vector<char> fails(std::size_t(problem.batch), false);
    std::atomic<bool> all_good{true};
    for_groups(problem, all_members(problem), true, [&](const Members<S>& group) {
        with_products(group, [&](auto& products) {
            if (!products.forward(value, fails)) all_good = false;
        });
    });
    good = all_good;
    std::vector<int64_t> members;
    for (int64_t b = 0; b < problem.batch; ++b) {
        if (fails[std::size_t(b)]) members.push_back(b);
    }
    return members;
}

template <class S>
void backward_in_exp_space(const AutomatonProblem<S>& problem, const std::vector<int64_t>& members, const S* seed,
                           const AutomatonArrays<S>& gradients) {
    for_groups(problem, members, true, [&](const Members<S>& group) {
        with_products(group, [&](auto& products) { products.backward(seed, gradients); });
    });
}

template <class S>
void hessian_in_exp_space(const AutomatonProblem<S>& problem, const std::vector<int64_t>& members, const S* seed,
                          const AutomatonArrays<const S>& z, const AutomatonArrays<S>& products) {
    for_groups(problem, members, true, [&](const Members<S>& group) {
        with_products(group, [&](auto& own) { own.hessian(seed, z, products); });
    });
}

template std::vector<int64_t> forward_in_exp_space(const AutomatonProblem<float>&, float*, bool&);
template std::vector<int64_t> forward_in_exp_space(const AutomatonProblem<double>&, double*, bool&);
template void backward_in_exp_space(const AutomatonProblem<float>&, const std::vector<int64_t>&, const float*,
                                    const AutomatonArrays<float>&);
template void backward_in_exp_space(const AutomatonProblem<double>&, const std::vector<int64_t>&, const double*,
                                    const AutomatonArrays<double>&);
template void hessian_in_exp_space(const AutomatonProblem<float>&, const std::vector<int64_t>&, const float*,
                                   const AutomatonArrays<const float>&, const AutomatonArrays<float>&);
template void hessian_in_exp_space(const AutomatonProblem<double>&, const std::vector<int64_t>&, const double*,
                                   const AutomatonArrays<const double>&, const AutomatonArrays<double>&);

}  // namespace bellmax::BELLMAX_ARCH::automata
