// Chosen keys: queries see a list of blocks of keys, and no others. The rows of a block of work share a list; their
// keys are counted along it, so that splits of it are equally long. Long blocks of keys are read in place, short
// ones copied into blocks of the size that the products take.
#pragma once

#include "contiguous.h"

namespace polyhead::PH_NAMESPACE {

// Whether values are the first columns of the keys' own memory, as a latent's are.
inline bool values_in_keys(const Attention& c) {
    for (int i = 0; i < c.count; ++i) {
        const KVSegment& s = c.segments[i];
        if (s.coding.group ? s.coding.v_bits != 0
                           : s.v != s.k || s.v_token != s.k_token || s.v_head != s.k_head || s.v_batch != s.k_batch)
            return false;
    }
    return true;
}

// Keys from several places, put one behind the other.
template <class T> class Gathered {
  public:
    Gathered(const Attention& c, const Rows& rows, int64_t size, T* scratch)
        : c_(c), rows_(rows), size_(size), shared_(values_in_keys(c)), k_(scratch),
          v_(shared_ ? k_ : scratch + size * c.key_dim), v_width_(shared_ ? c.key_dim : c.value_dim) {}

    int64_t room() const { return size_ - length_; }

    void add(const KVSegment& segment, int64_t start, int64_t count) {
        const Keys keys = keys_at(segment, rows_.batch, start, count, 0);
        for (int64_t j = 0; j < count; ++j) positions_[length_ + j] = keys.position(j);
        if (segment.coding.group) {
            expand(c_, rows_, segment, start, count, k_ + length_ * c_.key_dim, v_ + length_ * v_width_);
            for (int64_t j = 0; j < count; ++j) from_k_[length_ + j] = nullptr;
        } else {
            const T* k = (const T*)segment.k + rows_.kv_head * segment.k_head;
            const T* v = (const T*)segment.v + rows_.kv_head * segment.v_head;
            const int64_t* pages = segment.pages ? segment.pages + rows_.batch * segment.pages_batch : nullptr;
            for (int64_t j = 0; j < count; ++j) {
                const int64_t slot = start + j + (pages ? segment.skipped : 0);
                const int64_t row = pages ? pages[slot / segment.page_length] : rows_.batch;
                const int64_t token = pages ? slot % segment.page_length : slot;
                from_k_[length_ + j] = k + row * segment.k_batch + token * segment.k_token;
                from_v_[length_ + j] = v + row * segment.v_batch + token * segment.v_token;
                if (length_ + j < kAhead) ask(length_ + j);
            }
        }
        length_ += count;
    }

    // Hands what was added to `block`, and begins anew.
    template <class Block> void give(Block&& block) {
        if (!length_) return;
        const Keys keys{c_.segments, 0, length_, 0, positions_, 0};
        const Visible visible = visible_of(c_, rows_, keys);
        if (visible != Visible::none) {
            for (int64_t j = 0; j < length_; ++j) {
                if (j + kAhead < length_) ask(j + kAhead);
                if (!from_k_[j]) continue;
                __builtin_memcpy(k_ + j * c_.key_dim, from_k_[j], c_.key_dim * sizeof(T));
                if (!shared_) __builtin_memcpy(v_ + j * v_width_, from_v_[j], v_width_ * sizeof(T));
            }
            block(keys, visible, Content<T>{k_, v_, c_.key_dim, v_width_});
        }
        length_ = 0;
    }

  private:
    static constexpr int64_t kAhead = 4;  // keys that are prefetched before they are copied

    void ask(int64_t j) const {
        if (!from_k_[j]) return;
        fetch(from_k_[j], c_.key_dim);
        if (!shared_) fetch(from_v_[j], c_.value_dim);
    }

    const Attention& c_;
    const Rows& rows_;
    const int64_t size_;
    const bool shared_;
    T *const k_, *const v_;
    const int64_t v_width_;
    int64_t length_ = 0;
    int64_t positions_[kPrefillKeys];
    const T *from_k_[kPrefillKeys], *from_v_[kPrefillKeys];  // null: the key is in its place already
};

// How far the first key of the list's next block is from a block of the same segment: processors cannot predict it.
template <class T>
void look_ahead(const Attention& c, const SegmentSlice& found, int64_t next, Content<T>& content) {
    const KVSegment& segment = *found.segment;
    if (next < 0 || next >= c.keys || segment.pages || segment.coding.group) return;
    const SegmentSlice then = slice_at(c, next);
    if (then.segment != found.segment) return;
    content.k_ahead = (then.start - found.start) * segment.k_token;
    content.v_ahead = (then.start - found.start) * segment.v_token;
}

// As over_keys, for the keys [from, to) of the rows' list.
template <class T, class Block>
void over_chosen(const Attention& c, const Rows& rows, int64_t from, int64_t to, int64_t size, T* scratch, Block&& block) {
    const int64_t each = chosen_length(c), last = (c.keys - 1) / c.chosen_size;
    const int64_t* list = c.chosen + rows.batch * c.chosen_batch + rows.first_head / c.chosen_heads * c.chosen_head +
                          (rows.t0 + c.chosen_skipped) / c.chosen_queries * c.chosen_list;
    Gathered<T> gathered(c, rows, size, scratch);
    int64_t visited = 0;
    for (int64_t at = from, next; at < to; at = next) {
        const int64_t entry = at / each, inside = at - entry * each;
        next = at - inside + each < to ? at - inside + each : to;
        if (list[entry] > last) break;
        if (list[entry] < 0) continue;
        const int64_t first = list[entry] * c.chosen_size + inside;
        for (int64_t left = c.keys - first < next - at ? c.keys - first : next - at, index = first; left > 0;) {
            const SegmentSlice found = slice_at(c, index);
            int64_t count = left < found.left ? left : found.left;
            if (count >= size && gathered.room() == size) {
                count = size;
                const Keys keys = keys_at(*found.segment, rows.batch, found.start, count, index);
                const Visible visible = visible_of(c, rows, keys);
                if (visible != Visible::none) {
                    auto content = content_of<T>(c, rows, *found.segment, found.start, count, scratch);
                    if (left < count + size && entry + 1 < c.chosen_count)
                        look_ahead(c, found, list[entry + 1] > last ? -1 : list[entry + 1] * c.chosen_size, content);
                    block(keys, visible, content);
                }
                if (++visited % kBlocksPerCheck == 0 && stopped(c)) return;
            } else {
                count = count < gathered.room() ? count : gathered.room();
                gathered.add(*found.segment, found.start, count);
                if (!gathered.room()) {
                    gathered.give(block);
                    if (++visited % kBlocksPerCheck == 0 && stopped(c)) return;
                }
            }
            index += count, left -= count;
        }
    }
    gathered.give(block);
}

}  // namespace polyhead::PH_NAMESPACE
