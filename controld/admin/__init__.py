"""The admin API: REST under `/v1`, OpenAPI generated from the routes, errors as problem+json, loopback by default."""
