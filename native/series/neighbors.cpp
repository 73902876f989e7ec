// The nearest series under hard DTW: lower bounds first, then a sweep that leaves out whatever cannot be near enough.
//
// A path pays in every row at least for the way from x to the range of y within the band (Keogh's bound), in the first
// and the last row for its corners (Kim's); the same holds for columns. Candidates are taken by their bounds. The sweep
// runs along anti-diagonals, which fill the lanes. A cell whose value and whose bound for what is still to come are
// above the limit belongs to no path of interest: the sweep keeps the cells between the first and the last of the
// others.
#include "neighbors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../lattice/region.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;
using lattice::Region;
using V = Vec<double>;
using Mask = Shape<V>::Int;
using Doubles = std::vector<double>;

constexpr int W = lanes_of<double>;
constexpr int64_t block_numbers = 1 << 15;  // of a block of candidates, which stays in the cache for all queries
constexpr int64_t most_queries = 64;        // that share the ranges of a block
constexpr double slack = 1 + 1e-9;          // for rounding: a bound prunes if it is clearly above

int64_t padded(int64_t length) { return length + W; }

template <int power>
V cost_of(V apart) {
    if constexpr (power == 2) return apart * apart;
    return greater<double>(apart, -apart);
}

// The lanes in which a comparison holds, as bits.
unsigned lanes_where(Mask mask) {
#if defined(__AVX2__)
    return unsigned(_mm256_movemask_pd((__m256d)mask));
#else
    unsigned lanes = 0;
    for (int l = 0; l < W; ++l) lanes |= unsigned(mask[l] != 0) << l;
    return lanes;
#endif
}

// A series as the sweeps read it: feature by feature, with room for a vector past the end.
struct FeatureSeries {
    int64_t length = 0;
    const double* numbers = nullptr;  // (features, padded(length))

    const double* feature(int64_t d) const { return numbers + d * padded(length); }
};

template <class S>
FeatureSeries read(const Collection<S>& from, int64_t k, int64_t features, bool reversed, double* to) {
    const int64_t length = from.begins[k + 1] - from.begins[k], stride = padded(length);
    const S* const numbers = from.numbers + from.begins[k] * features;
    for (int64_t d = 0; d < features; ++d) {
        for (int64_t i = 0; i < length; ++i) {
            to[d * stride + i] = double(numbers[(reversed ? length - 1 - i : i) * features + d]);
        }
        std::fill(to + d * stride + length, to + (d + 1) * stride, 0.0);
    }
    return {length, to};
}

// For each element of one series the elements of the other that it may be matched with.
struct Windows {
    int64_t rows = 0, columns = 0;
    std::vector<int64_t> first, last;

    void fit(int64_t new_rows, int64_t new_columns, double band) {
        if (rows == new_rows && columns == new_columns) return;
        rows = new_rows, columns = new_columns;
        const int64_t lengths[2] = {rows, columns};
        const Region region(lengths, band);
        first.resize(std::size_t(rows)), last.resize(std::size_t(rows));
        for (int64_t i = 0; i < rows; ++i) {
            first[std::size_t(i)] = region.first(i);
            last[std::size_t(i)] = region.last(i);
        }
        // Every path begins and ends in the corners.
        first.front() = last.front() = 0;
        first.back() = last.back() = columns - 1;
    }
};

// The least and the greatest number of a series within each window, (features, 2, padded(rows)); past the end all
// numbers.
class Ranges {
    std::vector<int64_t> queue;

    // The windows' ends never go back: a queue holds the places that are extreme for some window still to come.
    template <class Before>
    void extremes(const double* numbers, const Windows& windows, bool reversed, Before before, double* to) {
        std::size_t head = 0, tail = 0;
        int64_t next = 0;
        for (int64_t i = 0; i < windows.rows; ++i) {
            const int64_t first = windows.first[std::size_t(i)], last = windows.last[std::size_t(i)];
            for (next = std::max(next, first); next <= last; ++next) {
                while (tail > head && !before(numbers[queue[tail - 1]], numbers[next])) --tail;
                queue[tail++] = next;
            }
            while (queue[head] < first) ++head;  // ends at the last place of the window, which was just queued
            to[reversed ? windows.rows - 1 - i : i] = numbers[queue[head]];
        }
    }

public:
    // The numbers come in order, or reversed; so do the results.
    void find(const FeatureSeries& series, int64_t features, bool reversed_in, const Windows& windows,
              bool reversed_out, double* to);
};

void Ranges::find(const FeatureSeries& series, int64_t features, bool reversed_in, const Windows& windows,
                  bool reversed_out, double* to) {
    queue.resize(std::size_t(series.length));
    Doubles in_order(std::size_t(series.length));
    const int64_t rows = windows.rows, stride = padded(rows);
    for (int64_t d = 0; d < features; ++d, to += 2 * stride) {
        const double* numbers = series.feature(d);
        if (reversed_in) {
            std::reverse_copy(numbers, numbers + series.length, in_order.begin());
            numbers = in_order.data();
        }
        extremes(numbers, windows, reversed_out, [](double a, double b) { return a < b; }, to);
        extremes(numbers, windows, reversed_out, [](double a, double b) { return a > b; }, to + stride);
        std::fill(to + rows, to + stride, -infinity<double>);
        std::fill(to + stride + rows, to + 2 * stride, infinity<double>);
    }
}

// What some elements pay at least: the cost of the way to their ranges.
template <int power>
V least_costs(const FeatureSeries& series, int64_t features, const double* ranges, int64_t i) {
    const int64_t stride = padded(series.length);
    V total{};
    for (int64_t d = 0; d < features; ++d, ranges += 2 * stride) {
        const V x = load<double>(series.feature(d) + i);
        const V below = load<double>(ranges + i) - x, above = x - load<double>(ranges + stride + i);
        total += cost_of<power>(greater<double>(greater<double>(below, above), V{}));
    }
    return total;
}

// Keogh's bound, with Kim's at the ends; anything above the limit once it is clear that it is.
template <int power>
double bound(const FeatureSeries& series, int64_t features, const double* ranges, double limit) {
    V total{};
    for (int64_t i = 0; i < series.length;) {
        const int64_t until = std::min(series.length, i + 8 * W);
        for (; i < until; i += W) total += least_costs<power>(series, features, ranges, i);
        if (sum_lanes<double>(total)[0] > limit) break;
    }
    return sum_lanes<double>(total)[0];
}

// Lower bounds of the total cost of the elements past each one, or before each one.
template <int power>
void sums(const FeatureSeries& series, int64_t features, const double* ranges, bool past, double* to) {
    for (int64_t i = 0; i < series.length; i += W)
        store<double>(to + i, least_costs<power>(series, features, ranges, i));
    double total = 0;
    for (int64_t n = 0; n < series.length; ++n) {
        const int64_t i = past ? series.length - 1 - n : n;
        total += std::exchange(to[i], total);
    }
}

// The rows that each anti-diagonal of a table has within the band.
struct Diagonals {
    int64_t rows = 0, columns = 0;
    std::vector<int64_t> first, last;

    void fit(int64_t new_rows, int64_t new_columns, double band) {
        if (rows == new_rows && columns == new_columns) return;
        rows = new_rows, columns = new_columns;
        const int64_t lengths[2] = {rows, columns}, count = rows + columns - 1;
        const double reach = Region(lengths, band).reach;
        first.resize(std::size_t(count)), last.resize(std::size_t(count));
        const auto aside = [&](int64_t i, int64_t s) {
            return double(i) * double(columns - 1) - double(s - i) * double(rows - 1);
        };
        int64_t low = 0, high = -1;
        for (int64_t s = 0; s < count; ++s) {
            low = std::max(low, s - columns + 1), high = std::min({high + 1, s, rows - 1});
            while (low <= high && aside(low, s) < -reach) ++low;
            while (high >= low && aside(high, s) > reach) --high;
            first[std::size_t(s)] = low, last[std::size_t(s)] = high;
        }
    }
};

// Two series, y from its end to its beginning, and what a path pays at least past each row and column.
struct Pair {
    FeatureSeries x, y;
    const double *past_rows, *past_columns;
    const Diagonals& diagonals;
};

class PairBound {
    Doubles room[3];

public:
    int64_t cells = 0;  // that were computed so far

    // The cost of the best path, or ∞ if it is above the limit.
    template <int power>
    double run(const Pair& p, int64_t features, double limit);
};

template <int power>
double PairBound::run(const Pair& p, int64_t features, double limit) {
    const int64_t rows = p.x.length, columns = p.y.length;
    double* diagonal[3];  // this one, the one before, and that before it, by rows
    for (int n = 0; n < 3; ++n) {
        room[n].resize(std::size_t(std::max<int64_t>(int64_t(room[n].size()), rows + 2 * W)));
        diagonal[n] = room[n].data() + W;
    }
    diagonal[1][-1] = diagonal[1][0] = infinity<double>;
    diagonal[2][-1] = 0;
    constexpr int64_t nowhere = int64_t(1) << 60;
    int64_t first[2] = {nowhere, -1}, last[2] = {-nowhere, -1};  // of the cells that are alive
    Mask lane;
    for (int l = 0; l < W; ++l) lane[l] = l;
    for (int64_t s = 0; s < rows + columns - 1; ++s) {
        const int64_t low = std::max(p.diagonals.first[std::size_t(s)], std::min(first[0], first[1] + 1));
        const int64_t high = std::min(p.diagonals.last[std::size_t(s)], std::max(last[0], last[1]) + 1);
        const int64_t shift = columns - 1 - s;
        first[1] = first[0], last[1] = last[0];
        first[0] = nowhere, last[0] = -nowhere;
        for (int64_t i = low; i <= high; i += W) {
            V cost{};
            for (int64_t d = 0; d < features; ++d) {
                cost += cost_of<power>(load<double>(p.x.feature(d) + i) - load<double>(p.y.feature(d) + shift + i));
            }
            const V across = lesser<double>(load<double>(diagonal[2] + i - 1), load<double>(diagonal[1] + i - 1));
            const V value = cost + lesser<double>(across, load<double>(diagonal[1] + i));
            const V rest = greater<double>(load<double>(p.past_rows + i), load<double>(p.past_columns + shift + i));
            const Mask alive = (value + rest <= limit) & (lane <= high - i);
            store<double>(diagonal[0] + i, alive ? value : V{} + infinity<double>);
            if (const unsigned lanes = lanes_where(alive)) {
                if (first[0] == nowhere) first[0] = i + __builtin_ctz(lanes);
                last[0] = i + 31 - __builtin_clz(lanes);
            }
        }
        cells += std::max<int64_t>(0, high - low + 1);
        if (last[0] < 0 && last[1] < 0) return infinity<double>;
        if (low <= rows) diagonal[0][low - 1] = infinity<double>;
        if (high < rows) diagonal[0][high + 1] = infinity<double>;
        std::swap(diagonal[1], diagonal[2]);
        std::swap(diagonal[0], diagonal[1]);
    }
    return diagonal[1][rows - 1];
}

// Candidates, and their ranges for queries of one length.
struct Candidates {
    int64_t begin, end;
    std::vector<FeatureSeries> series;
    std::vector<const double*> ranges;
    Doubles numbers, extremes;

    template <class S>
    void prepare(const NeighborsProblem<S>& p, int64_t rows, Windows& windows, Ranges& finder) {
        const int64_t count = end - begin, elements = p.y.begins[end] - p.y.begins[begin];
        numbers.resize(std::size_t((elements + count * W) * p.features));
        extremes.resize(std::size_t(count * padded(rows) * 2 * p.features));
        series.clear(), ranges.clear();
        double *to = numbers.data(), *extreme = extremes.data();
        for (int64_t c = begin; c < end; ++c) {
            series.push_back(read(p.y, c, p.features, true, to));
            windows.fit(rows, series.back().length, p.band);
            finder.find(series.back(), p.features, true, windows, false, extreme);
            ranges.push_back(extreme);
            to += padded(series.back().length) * p.features;
            extreme += padded(rows) * 2 * p.features;
        }
    }
};

using Place = std::pair<double, int64_t>;  // a distance and an index: in this order among equals

// What one thread needs. Its queries are of one length.
template <class S, int power>
class Searcher {
    const NeighborsProblem<S>& p;
    Windows of_rows, of_columns;
    Diagonals diagonals;
    Ranges finder;
    PairBound sweep;
    Candidates candidates{};
    Doubles numbers, ranges, past_rows, past_columns;
    int64_t ranges_for = 0;  // of columns, or 0 if the ranges belong to another query
    std::vector<Place> order;
    Pace pace;

    // A candidate whose bound is above this cannot be a neighbor.
    double limit(const std::vector<Place>& found) const {
        return int64_t(found.size()) < p.k ? infinity<double> : found.front().first * slack;
    }

    void visit(const FeatureSeries& x, int64_t candidate, std::vector<Place>& found) {
        const std::size_t c = std::size_t(candidate - candidates.begin);
        const FeatureSeries& y = candidates.series[c];
        if (ranges_for != y.length) {
            ranges_for = y.length;
            of_columns.fit(y.length, x.length, p.band);
            ranges.resize(std::size_t(2 * p.features * padded(y.length)));
            finder.find(x, p.features, false, of_columns, true, ranges.data());
        }
        if (bound<power>(y, p.features, ranges.data(), limit(found)) > limit(found)) return;
        past_rows.resize(std::size_t(padded(x.length))), past_columns.resize(std::size_t(padded(y.length)));
        sums<power>(x, p.features, candidates.ranges[c], true, past_rows.data());
        sums<power>(y, p.features, ranges.data(), false, past_columns.data());
        diagonals.fit(x.length, y.length, p.band);
        pace.spend(x.length * y.length);
        const Pair pair{x, y, past_rows.data(), past_columns.data(), diagonals};
        const Place place{sweep.template run<power>(pair, p.features, limit(found)), candidate};
        if (int64_t(found.size()) == p.k) {
            if (!(place < found.front())) return;
            std::pop_heap(found.begin(), found.end());
            found.pop_back();
        }
        found.push_back(place);
        std::push_heap(found.begin(), found.end());
    }

    void search_block(int64_t query, std::vector<Place>& found) {
        numbers.resize(std::size_t(padded(p.x.begins[query + 1] - p.x.begins[query]) * p.features));
        const FeatureSeries x = read(p.x, query, p.features, false, numbers.data());
        ranges_for = 0;
        order.clear();
        for (int64_t c = candidates.begin; c < candidates.end; ++c) {
            pace.spend(x.length);
            if (c == p.without[query]) continue;
            const double* const extremes = candidates.ranges[std::size_t(c - candidates.begin)];
            const double least = bound<power>(x, p.features, extremes, limit(found));
            if (!(least > limit(found))) order.emplace_back(least, c);
        }
        std::sort(order.begin(), order.end());
        for (const auto& [least, c] : order) {
            if (least > limit(found)) break;
            visit(x, c, found);
        }
    }

public:
    explicit Searcher(const NeighborsProblem<S>& p) : p(p) {}

    // The queries of one length.
    void search(const std::vector<int64_t>& queries, S* distances, int64_t* indices, int64_t* cells) {
        std::vector<std::vector<Place>> found(queries.size());
        const int64_t rows = p.x.begins[queries[0] + 1] - p.x.begins[queries[0]];
        for (int64_t begin = 0; begin < p.y.count; begin = candidates.end) {
            candidates.begin = begin;
            for (candidates.end = begin + 1; candidates.end < p.y.count; ++candidates.end) {
                if ((p.y.begins[candidates.end + 1] - p.y.begins[begin]) * p.features > block_numbers) break;
            }
            candidates.prepare(p, rows, of_rows, finder);
            for (std::size_t q = 0; q < queries.size(); ++q) {
                sweep.cells = 0;
                search_block(queries[q], found[q]);
                cells[queries[q]] += sweep.cells;
            }
        }
        for (std::size_t q = 0; q < queries.size(); ++q) {
            std::sort_heap(found[q].begin(), found[q].end());
            for (int64_t n = 0; n < p.k; ++n) {
                distances[queries[q] * p.k + n] = S(found[q][std::size_t(n)].first);
                indices[queries[q] * p.k + n] = found[q][std::size_t(n)].second;
            }
        }
    }
};

// Queries that follow each other and are of one length, a few at a time.
template <class S>
std::vector<std::vector<int64_t>> groups_of(const Collection<S>& x, int threads) {
    const auto length = [&](int64_t q) { return x.begins[q + 1] - x.begins[q]; };
    const std::size_t most = std::size_t(std::min(most_queries, (x.count + threads - 1) / threads));
    std::vector<std::vector<int64_t>> groups;
    for (int64_t q = 0; q < x.count; ++q) {
        if (q == 0 || groups.back().size() == most || length(q - 1) != length(q)) groups.emplace_back();
        groups.back().push_back(q);
    }
    return groups;
}

template <int power, class S>
void search_all(const NeighborsProblem<S>& p, S* distances, int64_t* indices, int64_t* cells) {
    std::fill(cells, cells + p.x.count, 0);
    const auto groups = groups_of(p.x, p.threads);
    const auto make = [&] { return Searcher<S, power>(p); };
    take_turns(int64_t(groups.size()), p.threads, make, [&](int64_t g, Searcher<S, power>& own) {
        own.search(groups[std::size_t(g)], distances, indices, cells);
    });
}

template <class S>
void search(const NeighborsProblem<S>& p, S* distances, int64_t* indices, int64_t* cells) {
    if (p.power == 2) return search_all<2>(p, distances, indices, cells);
    search_all<1>(p, distances, indices, cells);
}

}  // namespace

template <class S>
NeighborsKernels<S> neighbors_kernels() {
    return {search<S>};
}
template NeighborsKernels<float> neighbors_kernels<float>();
template NeighborsKernels<double> neighbors_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
