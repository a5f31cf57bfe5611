"""Output for people and programs: tables, sentences, CSV, JSON, progress bars."""
