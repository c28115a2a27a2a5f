"""Reward of examples/grpo/letters.toml."""


def share_of_letter(completions, letter):
    """Return the share of characters of each completion that are the letter that its prompt asks for."""
    return [text.count(one) / max(len(text), 1) for text, one in zip(completions, letter, strict=True)]
