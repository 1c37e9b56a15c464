// NCCL between simulated GPUs: gloo on the same memory. Refuses what NCCL refuses.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {
at::Tensor host(const at::Tensor& t) {
  TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu (NCCL takes tensors of a GPU)");
  TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
  const auto& s = t.storage();
  c10::Storage alias(c10::Storage::use_byte_size_t(), s.nbytes(), c10::DataPtr(s.mutable_data(), c10::Device(c10::kCPU)), nullptr, false);
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}
std::vector<at::Tensor> hosts(const std::vector<at::Tensor>& all) {
  std::vector<at::Tensor> out;
  for (const auto& t : all) out.push_back(host(t));
  return out;
}
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Nccl(c10::intrusive_ptr<c10d::Backend> g) : c10d::Backend(g->getRank(), g->getSize()), gloo(std::move(g)) {}
  const std::string getBackendName() const override { return "nccl"; }
  static WorkPtr finish(WorkPtr work) { work->wait(); return work; }  // a stream's order; the host goes on in NCCL
  WorkPtr broadcast(std::vector<at::Tensor>& t, const c10d::BroadcastOptions& o) override { auto h = hosts(t); return finish(gloo->broadcast(h, o)); }
  WorkPtr allreduce(std::vector<at::Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto h = hosts(t);
    return finish(gloo->allreduce(h, o));
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    WorkPtr last;
    for (auto& each : t) { std::vector<at::Tensor> one{each}; c10d::AllreduceOptions a; a.reduceOp = o.reduceOp; last = allreduce(one, a); }
    return last;
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in, const c10d::AllgatherOptions& o) override {
    std::vector<std::vector<at::Tensor>> ho;
    for (auto& each : out) ho.push_back(hosts(each));
    auto hi = hosts(in);
    return finish(gloo->allgather(ho, hi, o));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto ho = host(out).view({-1}), hi = host(in).reshape({-1});
    std::vector<std::vector<at::Tensor>> parts{ho.chunk(getSize())};
    std::vector<at::Tensor> own{hi};
    return finish(gloo->allgather(parts, own, c10d::AllgatherOptions()));
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in, const c10d::AllgatherOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < out.size(); i++) last = _allgather_base(out[i], in[i], o);
    return last;
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto whole = host(in).clone().view({-1});
    std::vector<at::Tensor> one{whole};
    c10d::AllreduceOptions a;
    const bool mean = o.reduceOp == c10d::ReduceOp::AVG;
    a.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : o.reduceOp;
    auto work = finish(gloo->allreduce(one, a));
    if (mean) whole.div_(getSize());
    host(out).view({-1}).copy_(whole.chunk(getSize())[getRank()]);
    return work;
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in, const c10d::ReduceScatterOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < out.size(); i++) last = _reduce_scatter_base(out[i], in[i], o);
    return last;
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
    auto ho = host(out), hi = host(in);
    return finish(gloo->alltoall_base(ho, hi, os, is, o));
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return finish(gloo->barrier(c10d::BarrierOptions())); }
};
}  // namespace

PYBIND11_MODULE(nccl, m) {
  m.def("wrap", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<Nccl>(gloo); });
}
