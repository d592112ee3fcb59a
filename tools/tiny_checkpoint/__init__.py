"""Makes the embedded tiny DeepSeek-V3: its corpus, tokenizer, training, export and scores. Not part of the wheel."""
