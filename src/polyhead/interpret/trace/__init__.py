"""One attention layer step by step: from given matrices, or one head of a loaded model."""
