"""A session's turn from checkout to commit; deletes, imports and exports."""
