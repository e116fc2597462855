"""What a person sees of a run: tables, readings in plain words, figures, the page. Takes plain data, knows no other room."""
