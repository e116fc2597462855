"""loragate."""
