"""School questions in English and Chinese, with a rule per type of question."""
