// PTX instructions, one wrapper each. On the CPU shim the wrappers are the shim's own functions of
// the same names, written from the documented fragment layouts.
#ifdef CUDA_SHIM
using ptx::cp_async16;
using ptx::cp_async_commit;
using ptx::cp_async_wait;
using ptx::ldmatrix;
using ptx::mma_m16n8k16;
#else
// c += a b; a: 16x16, b: 16x8, as registers of two 16-bit elements.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (__is_same(T, __half))
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const T (&a)[8], const T (&b)[4]) {
  const uint32_t(&ra)[4] = reinterpret_cast<const uint32_t(&)[4]>(a);
  const uint32_t(&rb)[2] = reinterpret_cast<const uint32_t(&)[2]>(b);
  mma_m16n8k16<T>(c, ra, rb);
}
// Count 8x8 matrices of 16-bit elements; lanes 8i..8i+7 point to the rows of matrix i.
template <int Count, bool Transpose>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[Count], const void* row) {
  const unsigned p = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (Count == 4 && !Transpose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
  else if constexpr (Count == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
  else if constexpr (!Transpose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(p));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(p));
}
// 16 bytes from global to shared memory; bytes beyond source_bytes become zero.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
#endif
