#include "paths.h"

#include <atomic>
#include <stdexcept>
#include <utility>

namespace bellmax::BELLMAX_ARCH::automata {
namespace {

void check_room(const Plan& plan, int64_t frames, int64_t longest) {
    if (longest < plan.longest(frames)) throw std::invalid_argument("there is no room for a path");
}

// Puts the arcs of a path, of which there are `count` from the last to the first, in order.
void finish(int64_t* path, int64_t count, int64_t longest) {
    std::reverse(path, path + count);
    std::fill(path + count, path + longest, -1);
}

// The draws of a group that are at a node, in lists: by place and lane, of one frame and of the one before.
template <class S>
class Draws {
    Sweep<S>& sweep;
    const Plan& plan = sweep.plan;
    const Members<S>& group = sweep.group;
    const int64_t draws, choices, longest;
    const double* const uniforms;
    int64_t* const paths;
    std::vector<int32_t> here, before, next, arcs;  // next, and the number of arcs so far, by lane and draw

public:
    Draws(Sweep<S>& own, int64_t count, int64_t most_choices, const double* numbers, int64_t most_arcs, int64_t* to)
        : sweep(own),
          draws(count),
          choices(most_choices),
          longest(most_arcs),
          uniforms(numbers),
          paths(to),
          here(std::size_t(plan.states * lanes), -1),
          before(here),
          next(std::size_t(lanes * count)),
          arcs(next),
          used(next) {}

    void down() {
        sweep.down([&](int64_t first, int64_t last) {
            for (int64_t t = last; t > first; --t) step(t, first);
            if (first == 0) step(0, 0);
        });
    }

private:
    std::vector<int32_t> used;  // uniforms

    int64_t* path(int l, int64_t n) const { return paths + (group.b[l] * draws + n) * longest; }
    int64_t draw(node::Matrix of, int l, int64_t n) {
        const double uniform = uniforms[(group.b[l] * draws + n) * choices + used[std::size_t(l * draws + n)]++];
        return node::draw(sweep.q.get() + l, of, uniform);
    }
    void put(std::vector<int32_t>& lists, int64_t place, int l, int64_t n) {
        int32_t& first = lists[std::size_t(place * lanes + l)];
        next[std::size_t(l * draws + n)] = first;
        first = int32_t(n);
    }

    void step(int64_t t, int64_t first) {
        if (t > 0) sweep.read_frame(t);
        if (group.ends_at(t)) begin(t, first);
        for (int64_t p = plan.states - 1; p >= 0; --p) {
            const int32_t* const lists = here.data() + p * lanes;
            if (lists[0] < 0 && lists[1] < 0 && lists[2] < 0 && lists[3] < 0) continue;
            const node::Matrix of = sweep.weigh(t, p, first, false);
            sweep.spend(of.size());
            for (int l = 0; l < group.members; ++l) move(t, p, l, of);
        }
        std::swap(here, before);
        std::fill(before.begin(), before.end(), -1);
    }

    void begin(int64_t t, int64_t first) {
        const node::Matrix of = sweep.weigh_end(t, first, false);
        for (int l = 0; l < group.members; ++l) {
            for (int64_t n = 0; group.length[l] == t && n < draws; ++n) {
                const int64_t state = draw(of, l, n);
                if (state < 0) finish(path(l, n), 0, longest);
                else put(here, plan.place_of[std::size_t(plan.copy(state, l))], l, n);
            }
        }
    }

    void move(int64_t t, int64_t p, int l, node::Matrix of) {
        const int64_t middle = plan.middle[std::size_t(p)], begin = t > 0 ? plan.begin[std::size_t(p)] : middle - 1;
        for (int64_t n = here[std::size_t(p * lanes + l)], following; n >= 0; n = following) {
            following = next[std::size_t(l * draws + n)];
            const int64_t edge = begin + std::max<int64_t>(draw(of, l, n), 0);
            int32_t& count = arcs[std::size_t(l * draws + n)];
            if (t == 0 && edge < middle) {
                finish(path(l, n), count, longest);
                continue;
            }
            path(l, n)[count++] = plan.arc[std::size_t(plan.copy(edge, l))];
            put(edge < middle ? before : here, plan.source[std::size_t(plan.copy(edge, l))], l, n);
        }
    }
};

// The k best paths into the nodes of one member, by frames: scores, and the last edge with the rank of what is before.
// The frames of one block at a time, and the scores of the first frame of each block.
template <class S>
class Best {
    struct Way {
        int32_t edge, rank;
    };
    const AutomatonProblem<S>& problem;
    const Plan& plan;
    const int64_t b, k, length, size, stride, longest;
    const std::vector<double> arcs, start, final;
    std::vector<double> frame, saved, before, here;
    std::vector<Way> ways;
    Pace pace;

public:
    bool good = true;

    Best(const AutomatonProblem<S>& of, const Plan& own, int64_t member, int64_t count, int64_t most_arcs)
        : problem(of),
          plan(own),
          b(member),
          k(count),
          length(of.lengths[member]),
          size(of.states * count),
          stride(frames_per_block()),
          longest(most_arcs),
          arcs(copied(of.theta.arcs.of(member), of.arcs)),
          start(copied(of.theta.start.of(member), of.states)),
          final(copied(of.theta.final.of(member), of.states)),
          frame(std::size_t(own.labels), no_score),
          saved(std::size_t((length / stride + 1) * size)),
          before(std::size_t(size)),
          here(before),
          ways(std::size_t((stride + 1) * size)) {}

    void run(S* scores, int64_t* paths) {
        for (int64_t first = 0; first <= length / stride * stride; first += stride) solve_block(first);
        std::vector<double> best(std::size_t(k), no_score);
        std::vector<Way> ends(std::size_t(k), Way{-1, 0});
        for (int32_t s = 0; s < plan.states; ++s) {
            offer(best.data(), ends.data(), here.data() + plan.place_of[std::size_t(s)] * k, final[std::size_t(s)], s);
        }
        for (int64_t n = 0; n < k; ++n) {
            scores[b * k + n] = S(best[std::size_t(n)]);
            good &= scores[b * k + n] < infinity<S>;
        }
        trace(ends, paths + b * k * longest);
    }

private:
    int64_t frames_per_block() const {
        int64_t frames = 1;
        if ((length + 1) * size <= (int64_t(1) << 22)) return length + 1;
        while (frames * frames <= length) ++frames;
        return frames;
    }

    std::vector<double> copied(const S* from, int64_t count) const { return {from, from + count}; }

    // Offers what leads to a node over an edge. Scores before it are the best first.
    void offer(double* to, Way* own, const double* from, double score, int32_t edge) {
        good &= score < infinity<double>;
        for (int32_t rank = 0; rank < k; ++rank) {
            if (!node::insert(to, own, k, from[rank] + score, Way{edge, rank})) return;
        }
    }

    void solve_block(int64_t first) {
        if (first > 0) std::copy_n(saved.begin() + first / stride * size, size, here.begin());
        else solve(0, 0);
        const int64_t last = std::min(first + stride, length);
        for (int64_t t = first + 1; t <= last; ++t) solve(t, t - first);
        if (last == first + stride) std::copy_n(here.begin(), size, saved.begin() + last / stride * size);
    }

    void solve(int64_t t, int64_t n) {
        std::swap(before, here);
        std::fill(here.begin(), here.end(), no_score);
        pace.spend(plan.edges * k);
        const S* const row = problem.theta.log_probs.of(b) + (t - 1) * problem.labels;
        for (int64_t v = 0; t > 0 && v + 1 < plan.labels; ++v) frame[std::size_t(v)] = double(row[plan.used[std::size_t(v)]]);
        for (int64_t p = 0; p < plan.states; ++p) {
            double* const to = here.data() + p * k;
            Way* const own = ways.data() + n * size + p * k;
            const int64_t begin = plan.begin[std::size_t(p)], middle = plan.middle[std::size_t(p)];
            if (t == 0) {
                const double score = start[std::size_t(plan.state_at[std::size_t(p)])];
                good &= score < infinity<double>;
                node::insert(to, own, k, score, Way{-1, 0});
            }
            for (int64_t e = begin; t > 0 && e < middle; ++e) {
                const double score = frame[std::size_t(plan.label[std::size_t(e)])] + arc_score(e);
                offer(to, own, before.data() + plan.source[std::size_t(e)] * k, score, int32_t(e));
            }
            for (int64_t e = middle; e < plan.begin[std::size_t(p) + 1]; ++e) {
                offer(to, own, here.data() + plan.source[std::size_t(e)] * k, arc_score(e), int32_t(e));
            }
        }
    }
    double arc_score(int64_t e) const { return arcs[std::size_t(plan.arc[std::size_t(e)])]; }

    // Follows the ways of all paths to the start, block by block.
    void trace(const std::vector<Way>& ends, int64_t* paths) {
        struct Position {
            int64_t place, rank, count;
        };
        std::vector<Position> at;
        for (const Way& end : ends) {
            at.push_back({end.edge < 0 ? -1 : plan.place_of[std::size_t(end.edge)], end.rank, 0});
        }
        for (int64_t first = length / stride * stride, t = length; first >= 0; first -= stride) {
            if (first != length / stride * stride) solve_block(first);
            const int64_t until = first == 0 ? -1 : first;
            for (; t > until; --t) {
                for (int64_t n = 0; n < k; ++n) {
                    Position& own = at[std::size_t(n)];
                    while (own.place >= 0) {
                        const Way& way = ways[std::size_t((t - first) * size + own.place * k + own.rank)];
                        own.rank = way.rank;
                        if (way.edge < 0) {
                            own.place = -1;
                            break;
                        }
                        const bool is_emitting = way.edge < plan.middle[std::size_t(own.place)];
                        paths[n * longest + own.count++] = plan.arc[std::size_t(way.edge)];
                        own.place = plan.source[std::size_t(way.edge)];
                        if (is_emitting) break;
                    }
                }
            }
        }
        for (int64_t n = 0; n < k; ++n) finish(paths + n * longest, at[std::size_t(n)].count, longest);
    }
};

}  // namespace

template <class S>
void draw_paths(Sweep<S>& sweep, int64_t draws, int64_t choices, const double* uniforms, int64_t longest,
                int64_t* paths) {
    check_room(sweep.plan, sweep.group.longest, longest);
    Draws<S>(sweep, draws, choices, uniforms, longest, paths).down();
}
template void draw_paths(Sweep<float>&, int64_t, int64_t, const double*, int64_t, int64_t*);
template void draw_paths(Sweep<double>&, int64_t, int64_t, const double*, int64_t, int64_t*);

template <class S>
bool best_paths(const AutomatonProblem<S>& problem, int64_t k, S* scores, int64_t longest, int64_t* paths) {
    std::atomic<bool> all_good{true};
    const auto plan = [&](int64_t member) {
        const int32_t* const automaton = problem.automaton(member);
        return plan_of(&automaton, 1, problem.arcs, problem.states, problem.labels, false);
    };
    const Plan shared = problem.is_shared && problem.batch ? plan(0) : Plan{};
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        const Plan own = problem.is_shared ? Plan{} : plan(b);
        check_room(problem.is_shared ? shared : own, problem.lengths[b], longest);
        Best<S> best(problem, problem.is_shared ? shared : own, b, k, longest);
        best.run(scores, paths);
        if (!best.good) all_good = false;
    });
    return all_good;
}
template bool best_paths(const AutomatonProblem<float>&, int64_t, float*, int64_t, int64_t*);
template bool best_paths(const AutomatonProblem<double>&, int64_t, double*, int64_t, int64_t*);

}  // namespace bellmax::BELLMAX_ARCH::automata
