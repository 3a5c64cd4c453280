// `attend`, backward. Included once per instruction set, inside its namespace.

// Gradients of one group; P = 2^(S − LSE) with the log-sum-exp of all lists is the final weight of a pair, and the
// gradients of lists simply add up. Among huge scores rounding can put S above LSE: a weight is 1 at most.
template <class T>
void backward_group(const Row<T>& row, int64_t list_number, int64_t group, const Backward<T>& result, const T* grad,
                    const T* delta, T* dq, T* dk, T* dv, Scratch<T>& scratch) {
    constexpr int W = Simd<T>::W;
    const Call<T>& call = row.call;
    const List<T>& list = call.lists[list_number];
    Keys<T>& keys = scratch.keys;
    row.collect(list, group, true, keys);
    if (keys.size == 0) return;
    const int64_t key_columns = round_up(call.width, W), value_columns = round_up(call.value_width, W);
    const int64_t most = block_size(keys.size, J);
    T* packed = scratch.queries.get(call.width * I);
    T* packed_grad = scratch.grads.get(call.value_width * I);
    T* weights = scratch.scores.get(J * I);
    T* dscores = scratch.dscores.get(J * I);
    const T** key_list = scratch.lists[0].get(J);
    const T infinity = std::numeric_limits<T>::infinity();
    alignas(64) T lse[I], less[I], ones[J], scales[J];
    for (int64_t j = 0; j < J; ++j) ones[j] = T(1), scales[j] = call.scale;
    const T *q_rows[I], *g_rows[I];
    T *dq_rows[I], *dk_rows[J], *dv_rows[J];
    const int64_t at = row.number * call.n_queries, first_extra = row.of_group(list, group) * list.n_extra;

    for (int64_t first = 0; first < list.slots; first += I) {
        const int64_t n = std::min<int64_t>(I, list.slots - first), columns = round_up(n, W);
        const int32_t* queries = row.queries(list, group) + first;
        for (int64_t i = 0; i < I; ++i) {
            const int64_t query = i < n ? queries[i] : -1;
            // A query without any key, and an empty slot, has no weights: 2^(S − inf) is zero.
            lse[i] = query < 0 || result.lse[at + query] == -infinity ? infinity : result.lse[at + query] * T(LOG2_E);
            less[i] = query < 0 ? T(0) : delta[query];
            q_rows[i] = query < 0 ? nullptr : row.q + query * call.q.stride;
            g_rows[i] = query < 0 ? nullptr : grad + query * result.grad.stride;
            dq_rows[i] = query < 0 ? nullptr : dq + query * call.width;
        }
        pack_columns(q_rows, n, call.width, call.scale * T(LOG2_E), packed);
        pack_columns(g_rows, n, call.value_width, T(1), packed_grad);
        const Listed<T> q_whole =
            whole_vectors(q_rows, n, call.width, scratch.lists[1].get(I), scratch.query_rows);
        const Listed<T> g_whole =
            whole_vectors(g_rows, n, call.value_width, scratch.lists[2].get(I), scratch.grad_rows);
        const Pairs<T> pairs(row, list_number, group, first, n, keys);
        const int64_t seen = pairs.seen();
        for (int64_t start = 0; start < seen; start += most) {
            const int64_t size = std::min(most, seen - start);
            product<T>(Listed<T>{keys.k.data() + start}, size, 1, Strided<T>{packed, I}, columns, call.width,
                       Store<T>{weights, I}, scratch.prefetch);
            product<T>(Listed<T>{keys.v.data() + start}, size, 1, Strided<T>{packed_grad, I}, columns, call.value_width,
                       Store<T>{dscores, I}, scratch.prefetch);  // dO Vᵀ
            for (int64_t j = 0; j < size; ++j) {
                T *w = weights + j * I, *d = dscores + j * I;
                if (pairs.has_adjustments()) pairs.adjust(start + j, w, columns);
                for (int64_t i = 0; i < columns; i += W) store(w + i, power(lesser<T>(load(w + i) - load(lse + i), Vec<T>{})));
                if (call.dropout) {
                    for (int64_t i = 0; i < n; ++i) {
                        const T kept = pairs.kept(start + j, i), weight = w[i];
                        w[i] = weight * kept;
                        d[i] = weight * (d[i] * kept - less[i]);
                    }
                } else {  // dS = P ∘ (dO Vᵀ − δ)
                    for (int64_t i = 0; i < columns; i += W)
                        store(d + i, load(w + i) * (load(d + i) - load(less + i)));
                }
                const int64_t slot = keys.slot[start + j];
                if (start + j < keys.n_listed) {
                    dk_rows[j] = dk + keys.number[start + j] * call.width;
                    dv_rows[j] = dv + keys.number[start + j] * call.value_width;
                } else {
                    dk_rows[j] = list.d_extra_keys + (first_extra + slot) * call.width;
                    dv_rows[j] = list.d_extra_values + (first_extra + slot) * call.value_width;
                    T total = 0;
                    for (int64_t i = 0; i < n; ++i) total += d[i];
                    list.d_extra_bias[first_extra + slot] += total;
                }
            }
            // A key that stands twice in a tile would lose one of its sums: tiles are written row by row, so it does not.
            product<T>(Strided<T>{weights, I}, size, 1, g_whole, value_columns, n,
                       Into<T>{dv_rows, ones, ones, call.value_width}, scratch.prefetch);  // Σ_i P dO
            product<T>(Strided<T>{dscores, I}, size, 1, q_whole, key_columns, n,
                       Into<T>{dk_rows, ones, scales, call.width}, scratch.prefetch);  // Σ_i dS q
            const Listed<T> k_whole =
                whole_vectors(keys.k.data() + start, size, call.width, key_list, scratch.key_rows);
            product<T>(Strided<T>{dscores, 1}, n, I, k_whole, key_columns, size,
                       Into<T>{dq_rows, ones, scales, call.width}, scratch.prefetch);  // Σ_j dS k
        }
    }
}

template <class T>
void backward(const Call<T>& call, const Backward<T>& result) {
    if (call.batch * call.heads == 0) return;
    check_indices(call);
    const int64_t n_kv = call.batch * call.kv_heads, repeat = call.heads / call.kv_heads;
    const int64_t n_lists = static_cast<int64_t>(call.lists.size());
    const int64_t dq_size = repeat * call.n_queries * call.width;
    const int64_t dk_size = call.n_keys * call.width, dv_size = call.n_keys * call.value_width;
    // Heads that share keys add to the same rows, and so do groups: one thread at a time. Where heads are few, groups are
    // cut into parts with sums of their own. How many is a matter of shapes alone: results do not depend on threads.
    int64_t most_groups = 1;
    for (const List<T>& list : call.lists) most_groups = std::max(most_groups, list.n_groups);
    const int64_t n_parts = std::min(most_groups, n_kv >= 4 ? 1 : 4 / n_kv);
    // A query is in one group of a list: with a single list no two parts add to the same row of dq.
    const int64_t own_dq_size = n_lists == 1 ? 0 : dq_size, own_size = own_dq_size + dk_size + dv_size;
    std::vector<T> sums((n_parts - 1) * n_kv * own_size);
    std::vector<T> delta(call.batch * call.heads * call.n_queries);
    run(n_kv * repeat, call.threads, [&](int64_t number) {
        const T* grad = result.grad.data + number / call.heads * result.grad.batch_stride +
                        number % call.heads * result.grad.head_stride;
        for (int64_t i = 0; i < call.n_queries; ++i) {
            const T *g = grad + i * result.grad.stride, *o = result.out + (number * call.n_queries + i) * call.value_width;
            delta[number * call.n_queries + i] = dot(g, o, call.value_width);
        }
    });
    const auto place = [&](int64_t kv, int64_t part, T*& dq, T*& dk, T*& dv) {
        dq = result.dq + kv * dq_size, dk = result.dk + kv * dk_size, dv = result.dv + kv * dv_size;
        if (part == 0) return;
        T* own = sums.data() + ((part - 1) * n_kv + kv) * own_size;
        if (own_dq_size > 0) dq = own;
        dk = own + own_dq_size, dv = dk + dk_size;
    };
    run(n_kv * n_parts, call.threads, [&](int64_t task) {
        const int64_t kv = task / n_parts, part = task % n_parts;
        T *dq, *dk, *dv;
        place(kv, part, dq, dk, dv);
        Scratch<T>& scratch = Scratch<T>::mine();
        for (int64_t r = 0; r < repeat; ++r) {
            const Row<T> row(call, kv * repeat + r);
            const T* grad = result.grad.data + row.number / call.heads * result.grad.batch_stride +
                            row.number % call.heads * result.grad.head_stride;
            for (int64_t h = 0; h < n_lists; ++h) {
                const int64_t n_groups = call.lists[h].n_groups;
                const int64_t last = n_groups * (part + 1) / n_parts;
                for (int64_t g = n_groups * part / n_parts; g < last; ++g) {
                    scratch.prefetch.clear();
                    if (g + 1 < last) row.prefetch(call.lists[h], g + 1, scratch.prefetch, nullptr);
                    backward_group(row, h, g, result, grad, delta.data() + row.number * call.n_queries,
                                   dq + r * call.n_queries * call.width, dk, dv, scratch);
                    scratch.prefetch.rest();
                }
            }
        }
    });
    if (n_parts == 1) return;
    run(n_kv, call.threads, [&](int64_t kv) {
        T *dq, *dk, *dv;
        place(kv, 0, dq, dk, dv);
        for (int64_t part = 1; part < n_parts; ++part) {
            T *q, *k, *v;
            place(kv, part, q, k, v);
            for (int64_t i = 0; i < own_dq_size; ++i) dq[i] += q[i];
            for (int64_t i = 0; i < dk_size; ++i) dk[i] += k[i];
            for (int64_t i = 0; i < dv_size; ++i) dv[i] += v[i];
        }
    });
}
