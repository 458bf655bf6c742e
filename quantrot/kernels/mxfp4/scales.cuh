// Scale bytes of a part of a packed weight in shared memory, for products in blocks of 128 columns.

namespace quantrot {

// Bytes of a row of so many blocks: an odd number of words, so that eight rows' lie in eight banks.
__device__ __forceinline__ u32 scales_pitch(int blocks) { return (blocks | 1) * 4; }

// The warp's 16 rows' scale bytes of `count` blocks from number `first` on -> shared memory, each four through `change`, all
// warps' at `base`; zeros past the end of a row. Gives the address of the lane's first, of its first row.
template <class Change>
__device__ __forceinline__ u32 take_scales(const MixedArgs& args, u32 base, u32 pitch, int row, int first, int count,
                                           Change change) {
  const u32 to = base + warp_number() * 16 * pitch, mine = lane_number();
  const int there = args.groups / 4 - first;
  for (int c = mine; c < count; c += 32) {
    u32 bytes[16];
#pragma unroll
    for (int r = 0; r < 16; r++) {
      const i64 at = (i64)min(row + r, args.rows - 1) * args.groups + (first + c) * 4;
      bytes[r] = c < there ? __ldg((const u32*)((const unsigned char*)args.scale + at)) : 0;
    }
#pragma unroll
    for (int r = 0; r < 16; r++) store_shared(to + r * pitch + c * 4, change(bytes[r]));
  }
  warp_sync();
  return to + mine / 4 * pitch;
}

}  // namespace quantrot
