"""Answers about pictures: places, counts, text, charts, tables and questions."""
