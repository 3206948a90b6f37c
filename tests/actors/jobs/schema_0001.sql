CREATE TABLE api_keys (
    id VARCHAR(16) NOT NULL,
    name VARCHAR(64) NOT NULL,
    secret_hash VARCHAR(64) NOT NULL,
    requests_per_minute FLOAT,
    created_at FLOAT NOT NULL,
    revoked_at FLOAT,
    PRIMARY KEY (id)
);

CREATE TABLE deliveries (
    job VARCHAR(64) NOT NULL,
    url TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    due_at FLOAT,
    PRIMARY KEY (job)
);

CREATE INDEX deliveries_due ON deliveries (due_at);

CREATE TABLE files (
    name VARCHAR(255) NOT NULL,
    job VARCHAR(64),
    attempt INTEGER,
    delete_at FLOAT,
    PRIMARY KEY (name)
);

CREATE INDEX files_delete ON files (delete_at);

CREATE INDEX files_of_job ON files (job);

CREATE TABLE heartbeats (
    name VARCHAR(255) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    metrics TEXT NOT NULL,
    received_at FLOAT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE jobs (
    sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    id VARCHAR(64) NOT NULL,
    owner VARCHAR(64) NOT NULL,
    status VARCHAR(16) NOT NULL,
    request JSON NOT NULL,
    input_image TEXT,
    priority INTEGER NOT NULL,
    round BIGINT NOT NULL,
    deadline FLOAT,
    idempotency_key VARCHAR(255),
    body_digest VARCHAR(64) NOT NULL,
    error_code VARCHAR(64),
    error_message TEXT,
    stop_code VARCHAR(64),
    progress JSON,
    attempts INTEGER NOT NULL,
    losses INTEGER NOT NULL,
    worker VARCHAR(255),
    lease_token VARCHAR(64),
    lease_expires_at FLOAT,
    results JSON NOT NULL,
    warnings JSON NOT NULL,
    stage_seconds JSON NOT NULL,
    chip_seconds FLOAT NOT NULL,
    created_at FLOAT NOT NULL,
    started_at FLOAT,
    ended_at FLOAT,
    expires_at FLOAT,
    UNIQUE (id)
);

CREATE INDEX jobs_expiry ON jobs (expires_at);

CREATE UNIQUE INDEX jobs_idempotency ON jobs (owner, idempotency_key);

CREATE INDEX jobs_of_owner ON jobs (owner, sequence);

CREATE INDEX jobs_outcomes ON jobs (error_code, status);

CREATE INDEX jobs_queue ON jobs (priority DESC, round, sequence) WHERE status = 'queued';

CREATE INDEX jobs_running ON jobs (lease_expires_at) WHERE status = 'in_progress';

CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);

INSERT INTO alembic_version VALUES ('0001');
