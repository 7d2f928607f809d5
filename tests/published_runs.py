"""Published runs that several tests calibrate with, without the figure that each of them measured."""

from __future__ import annotations

from typing import Any

#: Llama-3 70B cut to 12 layers on 8 B200 (SimuMax, public case llama3_70b_l12_tp1_pp2_dp4).
PUBLIC_B200: dict[str, Any] = {
    "id": "public-b200",
    "family": "simumax",
    "accelerator": "B200-SXM",
    "num_gpus": 8,
    "gpus_per_node": 8,
    "framework": "Megatron-LM 23e00ed, TE 2.11.0",
    "precision": "bf16",
    "model": {
        "name": "llama3_70b",
        "layers": 12,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 128256,
    },
    "seq_len": 4096,
    "global_batch": 16,
    "micro_batch": 1,
    "tp": 1,
    "pp": 2,
    "vpp": 1,
    "dp": 4,
    "cp": 1,
    "zero": "zero-1",
    "recompute": {"mode": "none"},
    "notes": "case llama3_70b_l12_tp1_pp2_dp4_mbc4_cef",
}
