// Has a torch that was built for CPUs believe in a GPU, as far as tensors without memory need one:
// there is a current device and a stream, events are empty, and attention is the kernel's that a
// build for CUDA takes: in half precision the flash one, with a mask the memory-efficient. Loaded before torch
// (LD_PRELOAD), since torch asks once which accelerator there is. No kernel can run.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

const Device kOnly(DeviceType::CUDA, 0);

struct OneDevice : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kOnly; }
  Device getDevice() const override { return kOnly; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice);

}  // namespace c10::impl

namespace at {

namespace accelerator {

std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }

}  // namespace accelerator

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

namespace native {

static int64_t choose_attention(
    const Tensor& q,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  const bool half = q.scalar_type() == kHalf || q.scalar_type() == kBFloat16;
  if (!half) return static_cast<int64_t>(sdp::SDPBackend::math);
  const auto fused = sdp::SDPBackend::efficient_attention;
  return static_cast<int64_t>(mask ? fused : sdp::SDPBackend::flash_attention);
}

static RegisterCUDADispatch<_fused_sdp_choice_stub_DECLARE_DISPATCH_type> chosen(
    _fused_sdp_choice_stub,
    &choose_attention);

}  // namespace native
}  // namespace at
