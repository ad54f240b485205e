"""What is an option called here that has another name elsewhere? For users who bring their calls along."""

from __future__ import annotations

_OWN_NAMES = {
    # Megatron-LM's text generation and server, and Accelerate's megatron_generate.
    "add_BOS": "bos_token_id, the token that shall stand before the prompts",
    "add_bos": "bos_token_id, the token that shall stand before the prompts",
    "beam_size": "num_beams",
    "beam_width": "num_beams",
    "eod_id": "eos_token_id",
    "num_return_gen": "num_return_sequences",
    "num_tokens_to_generate": "max_new_tokens",
    "num_tokens_total": "max_length",
    "random_seed": "seed",
    "stop_on_double_eol": r'stop_strings="\n\n", with tokenizer',
    "stop_on_eol": r'stop_strings="\n", with tokenizer',
    "stop_token": "eos_token_id",
    "stop_words": "stop_strings, with tokenizer",
    "termination_id": "eos_token_id",
    "tokens_to_generate": "max_new_tokens",
    "top_k_sampling": "top_k",
    "top_p_sampling": "top_p",
    # Hugging Face's generate.
    "generation_config": "an option for each of its fields (GenerationOptions has them all)",
    "inputs": "input_ids, the first argument",
    "stop": "stop_strings, with tokenizer",
    "streamer": "on_tokens, which gets each token as it is chosen",
    "tokens": "input_ids, the first argument",
    "output_logits": "the method logits",
    **dict.fromkeys(
        (
            *("return_log_probs", "return_output_log_probs", "return_output_log_probabilities"),
            *("output_scores", "return_dict_in_generate"),
        ),
        "the method generate_with_scores",
    ),
}
_NEEDLESS = {
    "token_type_ids": "GPTs and T5s read none",
    "use_cache": "keys and values are always kept",
    "synced_gpus": "the ranks always keep step",
    "use_eod_token_for_early_termination": "a text ends at eos_token_id, unless that is ()",
    "recompute": "recomputation and sequence parallelism are always off meanwhile",
}


def advice(name: str, known: list[str]) -> str:
    """What to write in place of the option ``name``, which there is none of.

    Args:
        name: As it was written.
        known: The options that there are.
    """
    if name in _OWN_NAMES:
        return f"here it is {_OWN_NAMES[name]}"
    if name in _NEEDLESS:
        return f"leave it out: {_NEEDLESS[name]}"
    return f"choose from {', '.join(known)}"
