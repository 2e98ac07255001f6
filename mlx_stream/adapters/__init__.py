"""Low-rank adapters beside a read-only base model, unmerged."""
