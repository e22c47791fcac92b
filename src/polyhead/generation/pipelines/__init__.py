"""Models with their tokenizers: text, translation, speech, embeddings of texts."""
