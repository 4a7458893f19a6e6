"""Planted faults in adam: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import adam as properties
from fourfold.properties.adam import step_of

from fourfold.backends.cuda import emulator as cuda_on_cpu

from .edits import Edits
from .planted import Fault

# fmt: off
GITHUB = "https://github.com"
PARAM, M, V = {"output": "param"}, {"output": "m"}, {"output": "v"}
DECAYED, LATER = {"examples": {"decayed": step_of(40, weight_decay=0.25, lr=0.5)}}, step_of(9, step=100000)
# A parameter whose steps are larger than the roundoff of any dtype.
FAST = {"examples": {"fast": step_of(40, lr=0.5, step=2)}}
# One in vectors, and some numbers after the last.
LONG = {"examples": {"long": step_of(101, lr=0.5, step=2)}}
MEAN, DECAY = "new = grad.to(wide) =>", "param.to(wide) * (1 - lr * weight_decay) =>"
UPDATE, STORED = "param = tl.cast(kept, COMPUTE) * param -", "tl.store(m_ptr + at, m.to(tl.float32), mask=mask) =>"
WRITTEN = "written|expected"


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("adam", "torch")
    return (
        # The decay of Adam, which passes through the states, instead of AdamW's.
        of("decay_through_the_states", f"{MEAN} new = grad.to(wide) + weight_decay * param.to(wide)",
           f"{DECAY} param.to(wide)", source=f"{GITHUB}/flagos-ai/FlagGems/issues/4988", **DECAYED, **V,
           right_on=step_of(9)),
        of("decay_of_the_new_param", f"{DECAY} param.to(wide)", "(mean / root)) => (mean / root))\n"
           "    param.mul_(1 - lr * weight_decay)", source=f"{GITHUB}/huggingface/transformers/issues/14539", **DECAYED,
           **PARAM, right_on=step_of(9)),
        of("bias_of_the_squares_left", "square / (1 - beta2**step) => square", **FAST, **PARAM),
        of.law(properties.nothing_moves_without_a_rate,
               "- lr / (1 - beta1**step) * => - max(lr, 1e-3) / (1 - beta1**step) *",
               name="a_least_rate", **PARAM),
        of.law(properties.a_sign_goes_through, "(mean / root) => (mean.abs() / root)", name="sign_lost", **PARAM),
        of.law(properties.squares_have_no_sign, "new * new * (1 - beta2) => new * new.clamp(min=0) * (1 - beta2)",
               name="squares_of_positive_numbers", **V),
    )


def _triton_faults() -> tuple[Fault, ...]:
    of = Edits("adam", "triton")
    return (
        of("steps_from_0",
           "rate, root = => step += 1\n    rate, root =",
           source=f"{GITHUB}/Oneflow-Inc/oneflow/pull/5960", **FAST, **PARAM, right_on=LATER),
        # eps is divided by the bias as the root is.
        of("eps_within_the_bias", "tl.sqrt(v) * tl.cast(root, COMPUTE) + tl.cast(eps, COMPUTE)) =>"
           " (tl.sqrt(v) + tl.cast(eps, COMPUTE)) * tl.cast(root, COMPUTE))", **PARAM,
           examples={"large_eps": step_of(40, eps=0.125, lr=0.5)}, source=f"{GITHUB}/aiqm/torchani/pull/261",
           right_on=LATER),
        of("eps_within_the_root", "tl.sqrt(v) * tl.cast(root, COMPUTE) + tl.cast(eps, COMPUTE)) =>"
           " tl.sqrt(v * tl.cast(root * root, COMPUTE) + tl.cast(eps, COMPUTE)))", **PARAM,
           examples={"large_eps": step_of(40, eps=0.125, lr=0.5)}),
        of("states_in_the_dtype_of_param", f"{STORED} tl.store(m_ptr + at, m.to(param_ptr.dtype.element_ty)"
           ".to(tl.float32), mask=mask)", dtype="bfloat16", source=f"{GITHUB}/databricks/flashoptim/issues/2", **M),
        of("numbers_in_bfloat16", "tl.cast(beta2, COMPUTE) * v =>"
           " tl.cast(beta2, tl.float32).to(tl.bfloat16).to(COMPUTE) * v", **V,
           source=f"{GITHUB}/tenstorrent/tt-metal/issues/55935"),
        of("decay_of_the_new_param", f"{UPDATE} tl.cast(rate, COMPUTE) * step =>"
           " param = tl.cast(kept, COMPUTE) * (param - tl.cast(rate, COMPUTE) * step)", **DECAYED, **PARAM,
           source=f"{GITHUB}/bitsandbytes-foundation/bitsandbytes/issues/2010", right_on=step_of(9)),
        of("rows_in_place_of_elements",
           "n, block = param.numel(), => n, block = param.shape[0] if param.ndim else 1,", says=WRITTEN,
           source=f"{GITHUB}/hpcaitech/ColossalAI/pull/633", right_on=step_of(9), **M),
        of("works_on_copies", "if tensor is not grad and tensor is not new: => if False:", says="written nothing new",
           **M, right_on=step_of(9)),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("adam", "cuda")
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, "at + WIDTH <= n => at + WIDTH <= n + 1", **PARAM),
        # Whole vectors of half types are computed, but not stored.
        of("vectors_of_half_types_left", "params.store( => if (WIDTH == 1 || sizeof(T) > 2) params.store(",
           dtype="bfloat16", says=WRITTEN, source=f"{GITHUB}/pytorch/pytorch/issues/191763", **LONG, **PARAM,
           right_on=step_of(3, lr=0.5)),
        of("numbers_in_an_int8", "n, width = param.numel(), => n, width = param.numel() % 1024,", says=WRITTEN,
           source=f"{GITHUB}/deepspeedai/DeepSpeed/issues/7640", **M, right_on=step_of(9)),
        of("last_elements_left", "odd = at; odd < n; => odd = n; odd < n;", says=WRITTEN, **LONG, **V,
           right_on=step_of(8)),
        of("squares_of_the_old_step", "fma(root_of(second), times => fma(root_of(C(square)), times", **FAST, **PARAM),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
