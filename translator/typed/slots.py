"""The placeholders: private-use characters that a tokenizer with slots has as pieces of their own."""

SLOTS = tuple(chr(0xE000 + place) for place in range(16))
NUMBERS, OTHERS = SLOTS[:10], SLOTS[10:]
"""Numbers have placeholders of their own: a language treats them in another way than a name or a tag."""
