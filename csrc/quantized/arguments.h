// Weights in blocks, as the module passes them to the code of an instruction set.
#pragma once

#include "../common/types.h"

namespace polyhead {

// Types of blocks that are read without unpacking, as GGUF files number them: name, type number, numbers and bytes of a
// block. From kFirstScaled on their scales lie in another tensor, as in files of Hugging Face (Scales).
constexpr int kFloat16Blocks = 1, kBFloat16Blocks = 30, kFirstScaled = 64, kFloat8 = 64, kScaledNumbers = 32;
#define PH_BLOCKS(BLOCK) \
    BLOCK(Q4_0, 2, 32, 18) BLOCK(Q4_1, 3, 32, 20) BLOCK(Q5_0, 6, 32, 22) BLOCK(Q5_1, 7, 32, 24) BLOCK(Q8_0, 8, 32, 34) \
    BLOCK(Q2_K, 10, 256, 84) BLOCK(Q3_K, 11, 256, 110) BLOCK(Q4_K, 12, 256, 144) BLOCK(Q5_K, 13, 256, 176) \
    BLOCK(Q6_K, 14, 256, 210) BLOCK(IQ4_NL, 20, 32, 18) BLOCK(IQ4_XS, 23, 256, 136) BLOCK(TQ2_0, 35, 256, 66) \
    BLOCK(MXFP4, 39, 32, 17) BLOCK(IQ2_XXS, 16, 256, 66) BLOCK(IQ2_XS, 17, 256, 74) BLOCK(IQ3_XXS, 18, 256, 98) \
    BLOCK(IQ1_S, 19, 256, 50) BLOCK(IQ3_S, 21, 256, 110) BLOCK(IQ2_S, 22, 256, 82) BLOCK(IQ1_M, 29, 256, 56) \
    BLOCK(TQ1_0, 34, 256, 54) BLOCK(F16, 1, 32, 64) BLOCK(BF16, 30, 32, 64) \
    BLOCK(F8_E4M3, 64, 32, 32) BLOCK(I8, 65, 32, 32) BLOCK(U8, 66, 32, 32) BLOCK(U4, 67, 32, 16)

// The grids of the IQ types, entries of 8 or 4 bytes, one after the other. They are the gguf package's, which
// Python hands over before a block of these types is read.
constexpr int64_t kGridOf1 = 0, kGridOf2XXS = kGridOf1 + 2048 * 8, kGridOf2XS = kGridOf2XXS + 256 * 8,
                  kGridOf2S = kGridOf2XS + 512 * 8, kGridOf3XXS = kGridOf2S + 1024 * 8, kGridOf3S = kGridOf3XXS + 256 * 4,
                  kGridBytes = kGridOf3S + 512 * 4;
extern uint8_t grids[kGridBytes];

// Bytes of a row of so many numbers; -1 where they are no whole blocks, or the type is not among these.
inline int64_t bytes_of_row(int64_t type, int64_t count) {
#define PH_ROW(name, number, numbers, bytes) if (type == number) return count % numbers ? -1 : count / numbers * bytes;
    PH_BLOCKS(PH_ROW)
#undef PH_ROW
    return -1;
}

// Types whose products take x in 8 bits where they are asked to, by kInt8Activations beside the type's number: those whose
// codes are whole numbers. And how many numbers a row may have.
constexpr int kInt8Activations = 256;
constexpr int64_t kMaxInt8Inputs = 1 << 15;  // a thread keeps them on its stack
constexpr bool takes_int8_activations(int64_t type) {
#define PH_TAKES(name, number, numbers, bytes) || type == number
    return type != kFloat16Blocks && type != kBFloat16Blocks && type != kFloat8 && (false PH_BLOCKS(PH_TAKES));
#undef PH_TAKES
}

// The scales of a weight whose blocks have none: number k of row n has those at [n / rows, k / numbers].
struct Scales {
    const void* scales;                 // [.., row]
    Dtype dtype;                        // of scales
    const uint8_t* zeros;               // the code that stands for 0, of the same shape; null: the middle one
    int64_t numbers, rows, row;
};

}  // namespace polyhead
