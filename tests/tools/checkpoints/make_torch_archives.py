"""Makes the files of torch_archives/ with PyTorch, which the tests then need not have.

python tests/tools/checkpoints/make_torch_archives.py
"""

from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "torch_archives"


def main() -> None:
    torch.manual_seed(0)
    numbers = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    shared = torch.tensor([3.0, 5.0, 7.0])
    _save(
        "tensors.pt",
        {
            "scalar": torch.tensor(1.5),
            "one": torch.tensor([2.5]),
            "bfloat16": torch.tensor([1.0, 3.140625], dtype=torch.bfloat16),
            "half": torch.tensor(0.5, dtype=torch.float16),
            "double": torch.tensor(0.1, dtype=torch.float64),
            "whole numbers": torch.tensor([1, -2]),
            "turned": numbers.permute(2, 0, 1),
            "slice": numbers[1, 1:, ::2],
            "shared": shared[1],
            "expanded": shared[:1].expand(2, 3),
            "empty": torch.empty(0, 3),
            "not a tensor": {"enable": True, "axis": None, "bits": (4, 3)},
        },
    )
    _save("list.pt", [torch.tensor(1.0)])
    torch.save({"a": torch.tensor(1.0)}, FOLDER / "legacy.pt", _use_new_zipfile_serialization=False)
    for rank in range(2):
        _save(f"export/amax_dict_rank{rank}-mp2.pt", _amaxes(rank))


def _amaxes(rank: int) -> dict[str, torch.Tensor]:
    """As ModelOpt's ptq.py saves it: each rank has some of the experts, and all have the shared ones."""
    found = {
        f"layers.1.ffn.experts.{expert}.w{matrix}.{quantizer}._amax": torch.tensor(float(expert + matrix + 1))
        for expert in range(rank * 2, rank * 2 + 2)
        for matrix in (1, 2, 3)
        for quantizer in ("input_quantizer", "weight_quantizer")
    }
    # Two names that both ranks have: the larger is rank 0's in one, rank 1's in the other.
    found["layers.2.ffn.experts.0.w2.input_quantizer._amax"] = torch.tensor([9.0, 4.0][rank])
    found["model.layers.2.mlp.experts.1.down_proj.input_quantizer._amax"] = torch.tensor(
        [4.0, 9.0][rank], dtype=torch.bfloat16
    )
    found["layers.0.attn.wo.input_quantizer._amax"] = torch.tensor(8.0)
    return found


def _save(name: str, content: object) -> None:
    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, FOLDER / name)


if __name__ == "__main__":
    main()
