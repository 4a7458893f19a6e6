"""Write docs/memory_errors.md from what ``fourfold sanitize --json FILE FOLDER`` found in a public corpus.

Run ``python -m tests.public_kernels.memory_errors FILE``. Each script was read: `PROOFS` says why its report is right.
The command fails if a reported script has no proof, or if a script with a proof was not reported, unless its error
depends on the numbers that it draws.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "memory_errors.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"

# The gradient of ``x.sum()`` is one number, which torch expands to the shape of `x` with strides of 0.
EXPANDED = (
    "The script takes the gradient of a sum, so the gradient that comes in is one number in memory, expanded to its"
    " shape with strides of 0. The kernel addresses it with the strides of a contiguous tensor."
)
ONE_STATE = (
    "`h` holds one state of K x V elements for each head. The kernel addresses one for each chunk of the sequence:"
    " `h + i_bh * s_h_h + i_t * K * V`, or the same as a block pointer. Only the last heads leave the memory; others"
    " read the next head's state."
)
PER_TOKEN = (
    "The grid has one program for each token, and a program loads `context_lengths` at the index of its token. The"
    " script gives two lengths, one for each sequence. The block numbers that follow from the lengths lead outside of"
    " the cache, or to one place for several tokens."
)
FIRST_AXIS = (
    "The kernel selects a token by `v_index * stride_vbs`, where the stride is that of the first axis. The script's"
    " tensor has the heads there, and up to 128 tokens on the second axis."
)

PROOFS = {
    "apply_penalty.py": (
        "Program `b` loads `p_cumsum_seq_len` at `b` and `b + 1`. For a batch of 2 the script gives 2 sums, not 3: the"
        " last sequence's end is read past the tensor, and is the limit of its loads and stores."
    ),
    "attention_fwd_triton1.py": (
        "The last case has a sequence of 1. The block pointers have blocks of 32 rows, and no load or store has a"
        " `boundary_check`: each program also reads and writes the 31 rows after its own, which are other heads' rows."
    ),
    "chunk_bwd_dqkg.py": ONE_STATE,
    "chunk_delta_fwd.py": (
        "The function unpacks the shape of `k` as (B, H, T, K); the script passes it as (B, H, K, T). So K is 128 and T"
        " is 64 in the kernel, and a state of K x V elements is twice as large as `initial_state` and `final_state`"
        " have for each head."
    ),
    "chunk_gated_attention.py": (
        "The kernel takes the strides of `k` as those of (T, K), where the script passes (K, T) = (32, 128): row 127 of"
        " a head begins at element 127 x 128 = 16256, and a head has 4096."
    ),
    "chunk_gla_fwd.py": (
        ONE_STATE
        + " For K > 256 `A_intra` is allocated with a length of `BT` = 16, and the kernel stores to T = 128 rows."
    ),
    "chunk_gla_simple.py": ONE_STATE,
    "chunk_linear_attn.py": EXPANDED,
    "chunk_retention.py": (
        "`chunk_retention_bwd_kernel_dh` stores once, after its loop, to the block `i_k` = 0 of `dh`, which"
        " `new_empty` has made. The states of all other chunks stay unwritten, and `chunk_retention_bwd_kernel_dqkv`"
        " loads them in line 243 and adds them to the gradients. The load of line 172 is not used."
    ),
    "chunk_retention_ops.py": EXPANDED,
    "context_attn_llama.py": (
        "`req_to_token_indexs` is `torch.empty`, and nothing writes it: the kernel loads the places of keys and values"
        " from it."
    ),
    "context_attn_fwd.py": (
        "`b_start_loc` is 0 for all 16 sequences, so the programs of all sequences store to the first rows of `Out`,"
        " each its own result."
    ),
    "decay_cumsum.py": (
        "Programs of the last axis are numbered over batch and head, 0 to 3, and `i_bh * s_qk_h` is their offset. The"
        " script passes `H * T * DK` = 64, the stride of the batch, where a head has 32 elements: 2 x 64 is past the"
        " 128 elements."
    ),
    "flash_decode2_llama.py": (
        "Case 4 has sequences of 32 and 64 tokens in blocks of 8, so the kernel loops over 4 and 8 blocks. The tensors"
        " have 3."
    ),
    "flash_decode2_phi.py": (
        "The sequences have up to 47 tokens, drawn anew in each run, in blocks of 8 in case 3, so the kernel loops over"
        " up to 6 blocks. The tensors have 3."
    ),
    "fused_recurrent_delta.py": EXPANDED,
    "fused_recurrent_hgrn.py": EXPANDED,
    "fused_recurrent_retention.py": EXPANDED,
    "fused_rotary_embedding.py": PER_TOKEN,
    "index_select_bwd.py": (
        "Case 3 has the index 0 five times. Five programs store different rows to row 0: which remains is not defined,"
        " and a gradient would be their sum."
    ),
    "kv_cache_filling.py": (
        "`block_offsets` is 0 throughout: the programs of all blocks of all sequences store to block 0 of the caches."
    ),
    "layer_norm_triton.py": EXPANDED,
    "matmul_triton2.py": (
        "Loads are masked along K only, and rows and columns do not wrap around at M and N. Case 3 multiplies 16 x 16"
        " matrices in larger blocks."
    ),
    "mixed_sparse_attention.py": (
        "The loop over columns ends at the constant 16, and its load of `column_index` is masked by"
        " `start_n < num_cols` alone, not lane by lane. A row of `column_index` has 8 elements; after the last row the"
        " load leaves the memory."
    ),
    "nested_loops_processing.py": (
        "`c_ptrs` advances 2 elements after each of 24 stores of 2 x 2 elements: the last begins at element 46, and the"
        " 4 x 4 tensor has 16. No program uses `program_id`: where the grid has two, both store everything, with other"
        " values at one element in turn."
    ),
    "parallel_attention.py": EXPANDED,
    "parallel_retention_attention.py": (
        "Cases 2 to 4 give tensors of different shapes: in case 4 `q` has a batch of 4, `k` and `v` of 2. The grid has"
        " the batch of `q`."
    ),
    "quantize_copy_kv.py": (
        "`dest_loc2` is `torch.randint` over 8192 places, 8192 times: places repeat, and two programs store different"
        " rows to one."
    ),
    "quantize_kv_copy.py": (
        "`dest_loc` is random: places repeat, and two programs store different rows to one. Case 2 has an output of one"
        " row, and destinations up to 9."
    ),
    "rotary_emb_nopad.py": PER_TOKEN,
    "sgmv_expand_slice.py": (
        "Case 3 has `slice_offset` = 16 and a slice of 32 columns, in an output of 32 columns. The mask compares with"
        " `slice_offset + N` = 48: each row spills into the next, and the last row past the memory."
    ),
    "softmax_reducev.py": FIRST_AXIS,
    "token_attn_llama2.py": (
        "`B_Loc` selects a token by the stride of the first axis of `K`, which has the 2 sequences there: token 24"
        " begins at element 196608 of 16384. In further cases `max_input_len` is smaller than the sequences, so"
        " `max_input_len - cur_batch_seq_len` is negative; the starts of sequences are random and overlap."
    ),
    "token_attn_mistral.py": FIRST_AXIS,
    "token_attn_reduceV.py": FIRST_AXIS,
}
# The scripts that draw sizes at random, and so may have no error in a run.
RANDOM = {"flash_decode2_phi.py"}


def errors(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings that are not warnings."""
    return [finding for finding in result["findings"] if not finding["warning"]]


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


def section(name: str, found: list[dict[str, Any]]) -> str:
    """Return the section of a script."""
    text = f"### {name}\n\n{PROOFS[name]}\n\n"
    text += row("line", "error", "tensor", "element", "first in program", "kernel") + row(*["---"] * 6)
    for finding in sorted(found, key=lambda finding: finding["line"]):
        kind = "race" if finding["kind"] == "race" else finding["kind"]
        program = f"{tuple(finding['program'])} of {tuple(finding['grid'])}"
        text += row(
            finding["line"],
            f"{finding['access']}, {kind}",
            f"`{finding['parameter']}`",
            finding["offset"],
            program,
            f"`{finding['kernel']}`",
        )
    return text + "\n"


def tables(scripts: dict[str, dict[str, Any]]) -> str:
    """Return the generated part of the page."""
    wrong = {name: errors(result) for name, result in scripts.items() if errors(result)}
    failed = {name: result["failure"] for name, result in scripts.items() if result["failure"]}
    kinds = ("out of bounds", "race", "unwritten")
    of_kind = [sum(any(x["kind"] == kind for x in found) for found in wrong.values()) for kind in kinds]
    text = (
        f"Of {len(scripts)} scripts {len(wrong)} have errors: {of_kind[0]} access memory out of bounds,"
        f" {of_kind[1]} have races, and {of_kind[2]} read memory that nothing has written (a script may have several"
        f" kinds). {len(failed)} did not run to the end.\n\n"
    )
    text += "".join(section(name, found) for name, found in wrong.items())
    if failed:
        text += "## Not run to the end\n\n" + row("script", "why") + row("---", "---")
        text += "".join(row(name, failure.splitlines()[-1]) for name, failure in failed.items())
    return text


def main() -> int:
    """Write the page; return 1 if the findings and the proofs differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("findings", metavar="FILE", type=Path, help="what fourfold sanitize --json has written")
    scripts = json.loads(parser.parse_args().findings.read_text())["scripts"]
    reported = {name for name, result in scripts.items() if errors(result)}
    differing = (reported - PROOFS.keys()) | (PROOFS.keys() - RANDOM - reported)
    for name in sorted(differing):
        print(f"{name}: {'reported without a proof' if name in reported else 'a proof, but no report'}")
    if differing:
        return 1
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables(scripts) + "\n" + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
