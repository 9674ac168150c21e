// Shapes that stand in no route of this gateway yet.
/** What `onbeat verify --json` prints. */
export interface AuditVerdict {
  job_id: string;
  verified: boolean;
  records: number;
  iterations: number;
  batches_trained: number;
  batches_evaluated: number;
  rewinds: number;
  digests_recomputed: number;
  gaps: string[];
  notes?: string[];
}
