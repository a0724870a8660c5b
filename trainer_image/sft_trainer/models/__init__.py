"""Models of transformers, and what is computed of them otherwise here."""

from sft_trainer.versions import hide_flash_attention_4

hide_flash_attention_4()
