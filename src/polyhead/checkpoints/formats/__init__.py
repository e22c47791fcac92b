"""File formats: GGUF, Hugging Face and CTranslate2 directories, weights stored as codes."""
