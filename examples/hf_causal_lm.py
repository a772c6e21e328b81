"""Bring a model of transformers: any causal language model trains once it returns logits and shows its blocks.

meshwright train examples/hf_causal_lm.toml            (needs pip install '.[hf]')
meshwright export runs/hf_causal_lm gpt2 --verify      AutoModelForCausalLM.from_pretrained("gpt2") loads it
"""

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from meshwright.hf import Drop, HuggingFaceFormat, NameMap, Rename


class SmallGPT2(nn.Module):
    """GPT-2 in small, with random weights; no download."""

    def __init__(self, vocab_size: int = 257, dim: int = 128, num_layers: int = 2, max_seq_len: int = 256) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=vocab_size,
            n_embd=dim,
            n_layer=num_layers,
            n_head=dim // 32,
            n_positions=max_seq_len,
            # Dropout draws random numbers on each rank: without it the losses are the same on any number of ranks.
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.lm = AutoModelForCausalLM.from_config(config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The repeated part: each block is sharded, recomputed and compiled on its own."""
        return self.lm.transformer.h

    def hugging_face(self) -> HuggingFaceFormat:
        """Return the names in a Hugging Face folder: those that it has in transformers. The head is tied."""
        tied = Drop("lm_head.weight", "the tied head", copy_of="lm.transformer.wte.weight")
        return HuggingFaceFormat(NameMap((Rename("lm.{rest}", "{rest}"),), drops=(tied,)), self.lm.config.to_dict())

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.lm(tokens_BS, use_cache=False).logits
