"""Training of controllers and drafts, and their evaluation."""
