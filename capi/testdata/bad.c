// Every kind of wrong call gives its status and a sentence, writes nothing, and leaves the process alive and the library working.
#include "check.h"

static one_token x;

static void refused(int line, int32_t status, int32_t want, const char *text) {
	if (status != want || strcmp(gdn_last_error(), text) != 0) {
		fprintf(stderr, "line %d: status %d, expected %d\n got %s\nwant %s\n", line, status, want, gdn_last_error(), text);
		exit(1);
	}
	for (int i = 0; i < 4; i++)
		if (x.ht[i] != 0 || x.o[i % 2] != 0) {
			fprintf(stderr, "line %d: an output was written\n", line);
			exit(1);
		}
	set_one_token(&x);
}

#define REFUSED(call, status, text) refused(__LINE__, call, status, text)
#define INVALID(text) REFUSED(gdn_fwd(&x.a), GDN_INVALID_ARGUMENT, text)

int main(void) {
	set_one_token(&x);
	REFUSED(gdn_fwd(NULL), GDN_INVALID_ARGUMENT, "gdn_fwd: args is NULL");
	x.a.size = 0;
	INVALID("gdn_fwd: args->size is 0, expected sizeof(gdn_fwd_args), which is 152 here");
	x.a.q = NULL;
	INVALID("gdn_fwd: q is NULL, expected [B T H K]");
	x.a.o = NULL;
	INVALID("gdn_fwd: o is NULL, expected [B T HV V]");
	x.a.k = (DLTensor *)(uintptr_t)3;
	INVALID("gdn_fwd: k is 0x3, not the address of a DLTensor");
	x.tk.t.ndim = 0, x.tk.t.shape = NULL;
	INVALID("gdn_fwd: k has rank 0, expected [B T H K]");
	x.tk.shape[3] = 1;
	INVALID("gdn_fwd: k has shape [1 1 1 1], expected [B T H K] with K=2");
	x.tk.shape[3] = INT64_MAX, x.tk.t.data = (void *)(uintptr_t)0x10000;
	INVALID("gdn_fwd: k has shape [1 1 1 9223372036854775807] at address 0x10000, which no memory can hold");
	x.tk.shape[1] = -1;
	INVALID("gdn_fwd: k has shape [1 -1 1 2], expected sizes from 0");
	x.tk.t.dtype.code = kDLInt;
	INVALID("gdn_fwd: k has dtype int32, expected float32, bfloat16 or float16");
	x.tk.t.data = NULL;
	INVALID("gdn_fwd: k has shape [1 1 1 2] and no data (NULL)");
	x.tv.t.device.device_type = kDLCUDA;
	INVALID("gdn_fwd: v is on CUDA:0, expected CPU like q");
	x.a.o = &x.tv.t;
	INVALID("gdn_fwd: o overlaps v, expected an output with memory of its own");
	x.a.gate = 5;
	INVALID("gdn_fwd: gate is 5, expected 0 or 1");
	x.a.neg_eigval = 1;
	INVALID("gdn_fwd: neg_eigval is 1 and beta_sigmoid is 0, expected beta_sigmoid 1 with it");
	x.a.scale = NAN;
	INVALID("gdn_fwd: scale is NaN, expected a finite number");

	int64_t offsets[] = {0, 2};
	tensor tcu;
	view(&tcu, offsets, 1, 2, 0, 0, 0)->t.dtype.code = kDLInt;
	tcu.t.dtype.bits = 64;
	x.a.cu_seqlens = &tcu.t;
	INVALID("gdn_fwd: cu_seqlens[1] is 2, expected at most T=1");
	offsets[0] = 1;
	x.a.cu_seqlens = &tcu.t;
	INVALID("gdn_fwd: cu_seqlens[0] is 1, expected 0");

	tensor *all[] = {&x.tq, &x.tk, &x.tv, &x.tg, &x.tbeta, &x.th0, &x.to, &x.tht};
	for (int i = 0; i < 8; i++)
		all[i]->t.device.device_type = kDLCUDA, all[i]->t.device.device_id = 1;
	REFUSED(gdn_fwd(&x.a), GDN_NO_BACKEND, "gdn_fwd: the tensors are on CUDA:1, for which this build has no backend; it has: cpu, ascend");

	x.a.q = NULL;
	REFUSED(gdn_supports("fwd", &x.a), GDN_INVALID_ARGUMENT, "gdn_fwd: q is NULL, expected [B T H K]");
	REFUSED(gdn_supports("fwd", NULL), GDN_INVALID_ARGUMENT, "gdn_fwd: args is NULL");
	REFUSED(gdn_supports(NULL, &x.a), GDN_INVALID_ARGUMENT, "gdn_supports: op is NULL, expected the name of an operator, such as \"fwd\"");
	REFUSED(gdn_supports("forward", &x.a), GDN_INVALID_ARGUMENT,
	        "gdn_supports: op is \"forward\", expected the name of an operator, such as \"fwd\"");
	REFUSED(gdn_set_num_threads(-1), GDN_INVALID_ARGUMENT, "gdn_set_num_threads: n is -1, expected at least 1");

	CHECK(gdn_fwd(&x.a) == GDN_OK && same(x.o, want_o, 2) && gdn_last_error()[0] == 0);
	return 0;
}
