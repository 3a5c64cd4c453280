// `attend`, forward.
//
// A group is cut into blocks of queries and keys. Scores are stored transposed, keys × queries. So a key is read in
// place, one number at a time, against queries that are packed as columns; maximum, power and sum run over whole
// vectors without a horizontal step; and the weights of a key are contiguous for the second product, whose vectors are
// rows of values. The result of a block is merged into the output as the product leaves its registers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "group_pairs.h"
#include "isa.h"
#include "memory.h"
#include "params.h"
#include "product.h"
#include "simd.h"
#include "softmax.h"
#include "threads.h"

namespace smyrf::SMYRF_ISA {

// Attends from the queries of one group to its keys, and merges the result into `out` (N, E) and `state` (N, 2).
template <class T>
void forward_group(const AttendRow<T>& row, int64_t list_number, int64_t group, T* out, T* state, Scratch<T>& scratch) {
    constexpr int W = Simd<T>::W;
    const AttendParams& params = row.params;
    const GroupList& list = params.lists[list_number];
    const int64_t width = params.width, value_width = params.value_width;
    GroupKeys<T>& keys = GroupKeys<T>::mine();
    row.collect(list, group, list.causal || list.multiplicity != nullptr || row.dropout.active, keys);
    if (keys.size == 0) return;
    const int64_t value_columns = round_up(value_width, W), most = block_size(keys.size, KEY_BLOCK);
    T* packed = scratch.queries.get(width * QUERY_BLOCK);
    T* scores = scratch.scores.get(KEY_BLOCK * QUERY_BLOCK);
    const T** value_rows = scratch.pointers[0].get(KEY_BLOCK);
    alignas(64) T top[QUERY_BLOCK], sum[QUERY_BLOCK], keep[QUERY_BLOCK], share[QUERY_BLOCK];
    const T* q_rows[QUERY_BLOCK];
    T* out_rows[QUERY_BLOCK];

    for (int64_t first = 0; first < list.n_query_slots; first += QUERY_BLOCK) {
        const int64_t n = std::min<int64_t>(QUERY_BLOCK, list.n_query_slots - first), columns = round_up(n, W);
        const int32_t* queries = row.queries(list, group) + first;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t query = queries[i];
            q_rows[i] = query < 0 ? nullptr : row.q + query * params.q.row_stride;
            out_rows[i] = query < 0 ? nullptr : out + query * value_width;
        }
        pack_columns(q_rows, n, width, row.scale * T(LOG2_E), packed);
        const Pairs<T> pairs(row, list_number, group, first, n, keys);
        const int64_t n_seen = pairs.n_seen();
        for (int64_t start = 0; start < n_seen; start += most) {
            const int64_t size = std::min(most, n_seen - start);
            product<T>(Scattered<T>{keys.k.data() + start}, size, 1, Strided<T>{packed, QUERY_BLOCK}, columns, width,
                       Store<T>{scores, QUERY_BLOCK}, scratch.prefetch);
            for (int64_t j = std::max<int64_t>(0, pairs.first_adjusted() - start); j < size; ++j)
                pairs.adjust(start + j, scores + j * QUERY_BLOCK, columns);
            softmax<T>(scores, size, columns, top, sum);
            if (row.dropout.active)
                for (int64_t j = 0; j < size; ++j)
                    for (int64_t i = 0; i < n; ++i) scores[j * QUERY_BLOCK + i] *= pairs.dropout_factor(start + j, i);
            merge_shares<T>(queries, n, start + size < n_seen ? n : pairs.first_seeing(), top, sum, state, keep, share);
            const Scattered<T> values =
                whole_vectors(keys.v.data() + start, size, value_width, value_rows, scratch.values);
            product<T>(Strided<T>{scores, 1}, n, QUERY_BLOCK, values, value_columns, size,
                       Merge<T>{out_rows, keep, share, value_width}, scratch.prefetch);
        }
    }
}

template <class T>
void attend_forward(const AttendParams& params, const AttendOutput& output) {
    const int64_t n_rows = params.batch * params.heads, n_lists = params.lists.n;
    if (n_rows * params.n_queries == 0) return;
    const int threads = params.execution.threads;
    const int64_t n_queries = params.n_queries, value_width = params.value_width;
    T *all_out = typed<T>(output.out), *all_lse = typed<T>(output.lse);
    prefer_large_pages(all_out, n_rows * n_queries * value_width * sizeof(T));
    std::unique_ptr<T[]> state(new T[2 * n_rows * n_queries]);  // base and mass of each query
    for (int64_t i = 0; i < n_rows * n_queries; ++i)
        state[2 * i] = -std::numeric_limits<T>::infinity(), state[2 * i + 1] = 0;

    // Each query is merged in the order of the lists, whatever the number of threads. A task is a whole row, or, for
    // the rows that are left when all threads have had the same number of rows, a block of groups of one list of a row.
    // Such a task waits until all blocks of the list before its own are done. This cannot deadlock because these have
    // smaller task numbers: `run` has handed them out already, and they wait only for lists before theirs.
    constexpr int64_t BLOCK_GROUPS = 8, ALL_LISTS = -1;
    struct Task {
        int64_t row, list, first, last;
        bool operator<(const Task& other) const { return row != other.row ? row < other.row : list < other.list; }
    };
    const int64_t n_whole = threads > 1 ? n_rows / threads * threads : n_rows;
    std::vector<Task> tasks;
    for (int64_t row = 0; row < n_whole; ++row) tasks.push_back({row, ALL_LISTS, 0, 0});
    for (int64_t row = n_whole; row < n_rows; ++row)
        for (int64_t h = 0; h < n_lists; ++h)
            for (int64_t g = 0; g < std::max<int64_t>(1, params.lists[h].n_groups); g += BLOCK_GROUPS)
                tasks.push_back({row, h, g, std::min(g + BLOCK_GROUPS, params.lists[h].n_groups)});
    assert(std::is_sorted(tasks.begin(), tasks.end()));
    std::unique_ptr<std::atomic<int64_t>[]> n_open(new std::atomic<int64_t>[(n_rows - n_whole) * n_lists]);
    for (int64_t i = 0; i < (n_rows - n_whole) * n_lists; ++i) n_open[i] = 0;
    for (const Task& task : tasks)
        if (task.list != ALL_LISTS) ++n_open[(task.row - n_whole) * n_lists + task.list];

    const auto attend_groups = [&](const AttendRow<T>& row, int64_t h, int64_t first, int64_t last) {
        const int64_t at = row.number * n_queries;
        T *out = all_out + at * value_width, *its_state = state.get() + 2 * at;
        Scratch<T>& scratch = Scratch<T>::mine();
        for (int64_t g = first; g < last; ++g) {
            scratch.prefetch.clear();
            if (g + 1 < last) row.prefetch(params.lists[h], g + 1, scratch.prefetch, out);
            forward_group(row, h, g, out, its_state, scratch);
            scratch.prefetch.finish();
        }
    };
    // Writes the log-sum-exp, and zeros for queries without keys.
    const auto finish = [&](const AttendRow<T>& row) {
        constexpr int W = Simd<T>::W;
        for (int64_t first = 0; first < n_queries; first += W) {
            const int64_t n = std::min<int64_t>(W, n_queries - first), at = row.number * n_queries + first;
            alignas(64) T base[W] = {}, mass[W] = {}, lse[W];
            for (int64_t i = 0; i < n; ++i) base[i] = state[2 * (at + i)], mass[i] = state[2 * (at + i) + 1];
            store(lse, load(base) * T(LN_2) + logarithm<T>(load(mass)));
            std::memcpy(all_lse + at, lse, n * sizeof(T));
            for (int64_t i = 0; i < n; ++i)
                if (mass[i] == T(0)) std::fill_n(all_out + (at + i) * value_width, value_width, T(0));
        }
    };
    run(static_cast<int64_t>(tasks.size()), threads, [&](int64_t number) {
        const Task& task = tasks[number];
        const AttendRow<T> row(params, task.row);
        if (task.list == ALL_LISTS) {
            for (int64_t h = 0; h < n_lists; ++h) attend_groups(row, h, 0, params.lists[h].n_groups);
            finish(row);
            return;
        }
        std::atomic<int64_t>* counts = n_open.get() + (task.row - n_whole) * n_lists;
        if (task.list > 0)  // only for smaller task numbers: see above, and `run`
            while (counts[task.list - 1].load(std::memory_order_acquire) > 0) std::this_thread::yield();
        const Finally done([&] {
            if (counts[task.list].fetch_sub(1, std::memory_order_acq_rel) == 1 && task.list == n_lists - 1) finish(row);
        });
        attend_groups(row, task.list, task.first, task.last);
    });
}

}  // namespace smyrf::SMYRF_ISA
