import type { JobStatus } from "../types";

/** What every tab of a job's page gets. The page waits for the first status before it shows a tab. */
export interface TabProps {
  jobId: string;
  /** Live; it stays as it was while the gateway is away. */
  status: JobStatus;
  /** What stands behind `?` in the address: `link(["jobs", jobId, TAB], {…})` of router.ts changes it. */
  query: URLSearchParams;
}
