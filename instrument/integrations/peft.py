"""Hugging Face peft: adapters that are made, saved, loaded and merged."""

from __future__ import annotations

LIBRARY = "peft"
TRIED = ("0.21.2", "0.21.2")
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "peft.mapping_func": {"get_peft_model": ()},
    "peft.peft_model": {"PeftModel": ("save_pretrained", "load_adapter", "add_adapter", "set_adapter", "delete_adapter")},
    "peft.tuners.tuners_utils": {"BaseTuner": ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")},
    "peft.utils.save_and_load": {"get_peft_model_state_dict": (), "set_peft_model_state_dict": ()},
}
