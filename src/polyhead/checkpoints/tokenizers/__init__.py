"""Tokenizers: of Hugging Face directories, GGUF files and CTranslate2; chat templates."""
