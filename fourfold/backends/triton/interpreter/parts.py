"""The private parts of Triton that the corrections to its interpreter use, and the purpose of each.

Any release may change them. `missing` names those that a release has changed.
"""

import importlib
import inspect
from typing import Any, NamedTuple


class PrivatePart(NamedTuple):
    """A private part of Triton.

    Attributes:
        path: the module, a colon, and the name in it.
        parameters: the names of its first parameters; None if it is not called, or its signature is unknown.
        use: its purpose here.
    """

    path: str
    parameters: tuple[str, ...] | None
    use: str


def _builder(name: str, parameters: str, use: str) -> PrivatePart:
    return PrivatePart(f"triton.runtime.interpreter:InterpreterBuilder.{name}", ("self", *parameters.split()), use)


def _interpreter(name: str, parameters: str | None, use: str) -> PrivatePart:
    return PrivatePart(
        f"triton.runtime.interpreter:{name}", None if parameters is None else tuple(parameters.split()), use
    )


PARTS = (
    # Values
    _interpreter("TensorHandle", "data dtype attr", "a value: an array and its type; replaced by a faster one"),
    _interpreter("TensorHandle.set_attr", "self key value", "what tl.multiple_of says; overridden"),
    _interpreter("_get_np_dtype", "tt_dtype", "the type of the array that holds a value; remembered by name"),
    PrivatePart("triton.language.core:block_type.__init__", ("self", "element_ty", "shape"), "remembered by shape"),
    PrivatePart("triton.language.core:tensor.__init__", ("self", "handle", "type"), "remembered by shape"),
    # Arithmetic
    _interpreter("InterpreterBuilder", "", "what computes; its class is replaced by one that derives from it"),
    _interpreter("interpreter_builder", None, "the one that computes"),
    _interpreter("interpreter_builder.options.sanitize_overflow", None, "set to False"),
    _builder("binary_op", "lhs rhs op", "an operator of two operands, with NumPy's function; overridden"),
    _builder("unary_op", "arg op", "an operator of one operand, with NumPy's function; overridden"),
    _builder("ternary_op", "lhs rhs other op", "tl.where, with NumPy's function; overridden"),
    _builder("cast_impl", "src dst_type", "conversions; overridden"),
    _builder("create_fp_to_fp", "src dst_type rounding_mode", "conversions that round; overridden"),
    _builder("get_all_ones_value", "type", "-1, for ~x; overridden"),
    _builder("create_maxnumf", "lhs rhs", "tl.maximum; overridden"),
    _builder("create_minnumf", "lhs rhs", "tl.minimum; overridden"),
    _builder("create_clampf", "arg lo hi propagate_nans", "tl.clamp; overridden"),
    _builder("create_fma", "x y z", "tl.fma; overridden"),
    _builder("create_umulhi", "lhs rhs", "tl.umulhi; overridden"),
    _builder("create_assume", "condition", "tl.assume; overridden"),
    _builder("create_dot", "a b d", "tl.dot; overridden"),
    _interpreter("interpreter_builder.codegen_fns", None, "the least sizes of tl.dot; replaced by those of NVIDIA's"),
    PrivatePart("triton.backends.nvidia.compiler:min_dot_size", ("target",), "the least sizes of tl.dot on a GPU"),
    _builder("create_make_tensor_descriptor", "base shape strides tensor_shape", "checks a descriptor; overridden"),
    _builder("create_splat", "ret_ty arg", "a block of one number; overridden"),
    _builder("create_expand_dims", "arg axis", "x[:, None]; overridden"),
    _interpreter("_ir.INPUT_PRECISION.TF32", None, "tells whether tl.dot rounds its operands"),
    _interpreter("_ir.ROUNDING_MODE.RTZ", None, "the one rounding that is left as it is"),
    _interpreter("_ir.PROPAGATE_NAN.NONE", None, "tells what tl.clamp does with NaN"),
    _interpreter("_ir.ATOMIC_OP.FADD", None, "tells atomic sums of floating-point numbers"),
    _interpreter("_ir.ATOMIC_OP.XCHG", None, "tells tl.atomic_xchg"),
    _interpreter("ReduceOps", "axis combine_fn keep_dims", "tl.reduce; replaced by one that derives from it"),
    _interpreter("ReduceOps.sum", "self input", "overridden"),
    _interpreter("ReduceOps.min_max", "self input val_reduce_op idx_reduce_op", "overridden"),
    _interpreter("ReduceOps.generic_reduce", "self input", "overridden"),
    _interpreter("ReduceOps.to_tensor", "self ret dtype", "makes an array a value"),
    _interpreter("ScanOps", "axis combine_fn reverse", "tl.associative_scan; replaced by one that derives from it"),
    _interpreter("ScanOps.cumsum", "self input", "overridden"),
    _interpreter("ScanOps.cumprod", "self input", "overridden"),
    # Memory
    _builder("create_masked_load", "ptrs mask other", "a load; overridden"),
    _builder("create_masked_store", "ptrs value mask", "a store; overridden"),
    _builder("create_atomic_rmw", "rmwOp ptr val mask sem scope", "atomic operations; overridden"),
    _builder("create_atomic_cas", "ptr cmp val sem scope", "tl.atomic_cas; overridden"),
    _builder("create_int_to_ptr", "src dst_type", "a pointer made of an integer; overridden"),
    _interpreter("_interpreter.load", None, "reads memory: pointers, mask, other, type"),
    _interpreter("_interpreter.store", None, "writes memory: pointers, values, mask"),
    # Launches
    _interpreter("GridExecutor", "fn arg_names grid pre_run_hooks", "a launch; replaced by one that derives from it"),
    _interpreter("GridExecutor.__call__", "self", "overridden"),
    _interpreter("GridExecutor._init_args_hst", "self args_dev kwargs", "copies a GPU's tensors"),
    _interpreter("GridExecutor._restore_args_dev", "self args_dev args_hst kwargs kwargs_hst", "copies them back"),
    _builder("set_grid_dim", "nx ny nz", "says how many programs there are"),
    _builder("set_grid_idx", "x y z", "says which of them runs"),
    _interpreter("_implicit_cvt", "arg", "makes a kernel's argument a value"),
    _interpreter("InterpreterError", "", "raised in place of what a kernel raises"),
    PrivatePart("triton.runtime.jit:mangle_type", ("arg",), "the type that an argument is compiled for"),
    PrivatePart("triton.runtime.jit:_normalize_ty", ("ty",), "the type that an annotation names"),
    PrivatePart("triton.language:str_to_ty", ("name",), "the type of that name"),
    # The language
    _interpreter("_patch_lang", "fn", "makes the language call the interpreter; done once for a launch"),
    _interpreter("_LangPatchScope", "", "remembers what _patch_lang has changed"),
    _interpreter("_LangPatchScope.restore", "self", "undoes it"),
    PrivatePart("triton.language.core:is_builtin", ("fn",), "tells the functions that the compiler knows"),
    PrivatePart("triton.language.semantic:TritonSemantic", ("builder",), "what a function means for types; recorded"),
    _interpreter("interpreter_semantic", None, "the one that kernels run with"),
    _interpreter("FunctionRewriter.ast_transformer", None, "changes a kernel's source; replaced"),
    _interpreter("FunctionRewriter._compile_and_exec", "self transformed_ast", "adds marks to a source; replaced"),
    _interpreter("InterpretedFunction.run", "self args grid warmup kwargs", "a launch, which is remembered; replaced"),
    _interpreter("InterpretedFunction.rewritten_fn", None, "the kernels whose source was changed; emptied"),
    _interpreter("ASTTransformer", "", "what it is; replaced by one that derives from it"),
)


def missing() -> list[str]:
    """Return one line for each part that this release of Triton lacks, or has with other parameters."""
    return [f"{part.path} {fault}; here: {part.use}" for part in PARTS if (fault := _fault(part))]


def _fault(part: PrivatePart) -> str | None:
    module, _, names = part.path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return f"is missing (no module {module})"
    for name in names.split("."):
        if not hasattr(value, name):
            return f"is missing (no {name})"
        value = getattr(value, name)
    if part.parameters is None:
        return None
    has = tuple(inspect.signature(value).parameters)
    expected = part.parameters
    return None if has[: len(expected)] == expected else f"takes ({', '.join(has)}), not ({', '.join(expected)}, ...)"
