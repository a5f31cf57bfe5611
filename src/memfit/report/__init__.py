"""What people and programs read: tables, sentences, CSV, JSON, progress bars."""
