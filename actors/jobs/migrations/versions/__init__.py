"""Steps of the schema. A released one is never changed."""
